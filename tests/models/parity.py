"""Running a `Decoder` without an engine, and comparing it with transformers."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.cache.spec import cache_spec
from minillm.layers.kv_cache import KVCache
from minillm.models.checkpoint import open_model
from minillm.models.decoder import Decoder
from minillm.models.loader import load_model
from minillm.ops.batch import Batch
from tests.models.tiny import Checkpoint, prompt

TOLERANCE = 1e-4  # of logits relative to the largest, float32; the figure
MARGIN = 1e-4  # two best logits nearer than this may swap places
PROMPT_LENGTHS = (1, 7, 130)
NEW_TOKENS = 64
BFLOAT16_TOLERANCE = 0.02  # see bfloat16_errors; 8 bits of mantissa, three layers


class FlatRunner:
    """Sequences over a paged cache whose blocks are scattered and whose unused memory is NaN."""

    def __init__(self, model: Decoder, block_size: int, max_len: int, num_sequences: int):
        self.model, self.block_size = model, block_size
        per_sequence = -(-max_len // block_size)
        num_blocks = per_sequence * num_sequences + 1  # one is never used
        dtype = model.dtype
        spec, layers = cache_spec(model.config), model.config.num_layers
        self.kv = KVCache(spec, layers, num_blocks, block_size, dtype)
        self.kv.key.fill_(torch.nan)
        self.kv.value.fill_(torch.nan)
        free = list(range(num_blocks))
        random.Random(0).shuffle(free)
        self.tables = [free[i * per_sequence :][:per_sequence] for i in range(num_sequences)]
        self.lengths = [0] * num_sequences

    def slot(self, sequence: int, position: int) -> int:
        block = self.tables[sequence][position // self.block_size]
        return block * self.block_size + position % self.block_size

    @torch.no_grad()
    def step(self, rows: list[tuple[int, Tensor]]) -> list[Tensor]:
        """Extend each (sequence, new ids [T]) -> the logits [T, V] of each, in one batch."""
        positions: list[int] = []
        slots: list[int] = []
        for sequence, ids in rows:
            start = self.lengths[sequence]
            new = range(start, start + len(ids))
            positions += new
            slots += [self.slot(sequence, position) for position in new]
            self.lengths[sequence] += len(ids)
        sizes = [len(ids) for _, ids in rows]
        batch = Batch(
            input_ids=torch.cat([ids for _, ids in rows]),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_start=torch.tensor([0, *sizes]).cumsum(0).int(),
            seq_lens=torch.tensor([self.lengths[s] for s, _ in rows], dtype=torch.int32),
            block_tables=torch.tensor([self.tables[s] for s, _ in rows]),
            logits_indices=torch.arange(sum(sizes)),
            max_query_len=max(sizes),
        )
        hidden = self.model(batch, self.kv)
        return list(self.model.logits(hidden[batch.logits_indices]).split(sizes))


def whole(model: Decoder, ids: Tensor) -> Tensor:
    """Logits [T, V] of one sequence in one step and one block."""
    return FlatRunner(model, len(ids), len(ids), 1).step([(0, ids)])[0]


def mixed(model: Decoder, prompts: list[Tensor], block_size: int, seed: int = 0) -> list[Tensor]:
    """The same logits from flat batches of chunks and single (decode) tokens of all prompts."""
    draw = random.Random(seed)
    runner = FlatRunner(model, block_size, max(map(len, prompts)), len(prompts))
    logits: list[list[Tensor]] = [[] for _ in prompts]
    while any(done < len(ids) for done, ids in zip(runner.lengths, prompts, strict=True)):
        rows = []
        for sequence in draw.sample(range(len(prompts)), len(prompts)):
            done = runner.lengths[sequence]
            size = draw.choice([0, 1, 1, 3, 24, 50])
            if ids := prompts[sequence][done : done + size].tolist():
                rows.append((sequence, torch.tensor(ids)))
        for (sequence, _), out in zip(rows, runner.step(rows) if rows else [], strict=True):
            logits[sequence].append(out)
    return [torch.cat(parts) for parts in logits]


def greedy(model: Decoder, prompts: list[Tensor], count: int) -> list[list[int]]:
    """`count` greedy tokens after each prompt, all sequences in one batch."""
    runner = FlatRunner(model, 16, max(map(len, prompts)) + count, len(prompts))
    rows = list(enumerate(prompts))
    tokens: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        for sequence, logits in enumerate(runner.step(rows)):
            tokens[sequence].append(int(logits[-1].argmax()))
        rows = [(sequence, torch.tensor(t[-1:])) for sequence, t in enumerate(tokens)]
    return tokens


@torch.no_grad()
def reference_logits(checkpoint: Checkpoint, ids: Tensor) -> Tensor:
    """Logits [T, V] of transformers."""
    return checkpoint.reference(ids[None], use_cache=False).logits[0]


@torch.no_grad()
def reference_greedy(
    checkpoint: Checkpoint, ids: Tensor, count: int
) -> Iterator[tuple[int, float]]:
    """transformers' greedy tokens, each with the margin between its two best logits."""
    cache = None
    for _ in range(count):
        out = checkpoint.reference(ids[None], past_key_values=cache, use_cache=True)
        best = out.logits[0, -1].topk(2)
        yield int(best.indices[0]), float(best.values[0] - best.values[1])
        cache, ids = out.past_key_values, best.indices[:1]


def relative_error(logits: Tensor, reference: Tensor) -> float:
    """Largest absolute difference over the largest absolute reference logit; NaN is infinite."""
    error = (logits.double() - reference.double()).abs().max() / reference.double().abs().max()
    return float(error.nan_to_num(nan=torch.inf))


@dataclass(frozen=True)
class Parity:
    """How far the engine is from transformers."""

    whole_error: float  # each prompt in one step
    mixed_error: float  # flat batches of chunks and decode rows
    agreeing: int  # greedy tokens equal, or differing where the margin is under MARGIN
    compared: int

    @property
    def error(self) -> float:
        """The larger of the two errors."""
        return max(self.whole_error, self.mixed_error)

    @property
    def holds(self) -> bool:
        """Whether the engine is right, in the sense of the issue."""
        return self.error <= TOLERANCE and self.agreeing == self.compared


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our model of the checkpoint's files."""
    source = open_model(checkpoint.folder)
    return load_model(source, dtype, max_model_len=checkpoint.tiny.max_model_len)


def measure(checkpoint: Checkpoint, model: Decoder, new_tokens: int = NEW_TOKENS) -> Parity:
    """Compare logits of every prompt, whole and in mixed batches, and greedy continuations."""
    prompts = [prompt(length, seed=length) for length in PROMPT_LENGTHS]
    references = [reference_logits(checkpoint, ids) for ids in prompts]
    outputs = [whole(model, ids) for ids in prompts]
    whole_error = max(map(relative_error, outputs, references))
    mixed_error = max(
        relative_error(out, reference)
        for block_size in (1, 5, 16)
        for out, reference in zip(
            mixed(model, prompts, block_size, seed=block_size), references, strict=True
        )
    )
    agreeing = compared = 0
    for tokens, ids in zip(greedy(model, prompts, new_tokens), prompts, strict=True):
        equal = agreement(tokens, reference_greedy(checkpoint, ids, new_tokens))
        agreeing, compared = agreeing + equal, compared + new_tokens
    return Parity(whole_error, mixed_error, agreeing, compared)


def agreement(tokens: list[int], reference: Iterator[tuple[int, float]]) -> int:
    """How many leading tokens are equal; all of them if the first difference is a near tie, after
    which the two texts cannot be compared."""
    for index, (token, (expected, margin)) in enumerate(zip(tokens, reference, strict=False)):
        if token != expected:
            return len(tokens) if margin < MARGIN else index
    return len(tokens)


def bfloat16_errors(checkpoint: Checkpoint) -> tuple[float, float]:
    """How far bf16 logits, ours and transformers', are from the float32 model with the same rounded
    weights: norm of the difference over norm, of the median among 130 tokens. The median, because
    a rounded router now and then picks another expert, which changes a token for good reason."""
    ids = prompt(130)
    rounded = checkpoint.tiny.build().bfloat16()
    theirs = Checkpoint(checkpoint.folder, rounded, checkpoint.tiny)
    bf16 = reference_logits(theirs, ids)
    rounded.float()
    exact = reference_logits(theirs, ids)
    ours = whole(load(checkpoint, torch.bfloat16), ids)

    def error(logits: Tensor) -> float:
        return float(((logits.float() - exact).norm(dim=1) / exact.norm(dim=1)).median())

    return error(ours), error(bf16)
