"""The models and the requests of the equality tests, and what "equal" means.

A cell is one engine configuration. Whatever it does to a request (cut its prompt into chunks, find
half of it in a cache, take its blocks away, run it among others), the tokens must be those that
the request gets alone.
"""

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minillm import LLM, SamplingParams
from minillm.api.outputs import CompletionOutput, Logprobs, RequestOutput
from minillm.models.forward_pass import Chunk
from minillm.sampling.sampler import SamplingRow, sample
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.request import Request
from tests.models.tiny import Tiny

BLOCK = 4
LONGEST = 192
SEATS = 12
MARGIN = 1e-4
LONG_PROMPT = 12  # which of the requests
SECOND_ONLY = 15
AGAIN = (SECOND_ONLY, 14, LONG_PROMPT, 9, 4, 2)  # the second wave: begun in the first
FAMILIES = {  # None: the embedded model
    "llama": Tiny("llama", {"num_hidden_layers": 2}),
    "deepseek_v2": Tiny("deepseek_v2", {"num_hidden_layers": 2}, seed=1),
    "qwen3_moe": Tiny("qwen3_moe", {"num_hidden_layers": 2}, seed=2),
    "tiny": None,
}
TEXT = '''def merge(left, right):
    """Merge two sorted lists."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    result.extend(left[i:])
    result.extend(right[j:])
    return result


class Stack:
    def __init__(self, items=None):
        self.items = list(items or [])

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()


def count_words(path):
    counts = {}
    with open(path) as lines:
        for line in lines:
            for word in line.split():
                counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda pair: -pair[1])
'''


# ---- requests --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One request: what goes into `LLM.generate`."""

    ids: tuple[int, ...]
    params: SamplingParams


def source_of_tokens(llm: LLM) -> list[int]:
    """Tokens to cut prompts from: real text for a model that was trained, else noise."""
    if llm.tokenizer is not None:
        return llm.tokenizer.encode(TEXT * 3)
    rng = random.Random(7)
    return [rng.randrange(3, 128) for _ in range(600)]


def jobs_of(llm: LLM, n: int) -> list[Job]:
    """15 requests of 1 to 150 tokens, and one for the second wave only. With n = 3 every second
    one is drawn three times.

    Six begin with the same 40 tokens, which end on a block's border; one prompt comes three times.
    """
    tokens = source_of_tokens(llm)
    cuts = iter(range(40, 600, 7))

    def own(count: int) -> tuple[int, ...]:
        start = next(cuts)
        return tuple(tokens[start : start + count])

    shared = tuple(tokens[:40])
    twice, greedy, drawn = shared + own(5), {"temperature": 0.0}, {"temperature": 0.9}
    table: list[tuple[tuple[int, ...], dict]] = [
        (own(1), greedy | {"max_tokens": 40}),
        (own(3), greedy | {"max_tokens": 42}),
        (twice, greedy | {"max_tokens": 16}),
        (twice, drawn | {"max_tokens": 20, "seed": 1, "top_p": 0.9}),
        (shared + own(20), greedy | {"max_tokens": 9}),
        (own(8), greedy | {"max_tokens": 24, "repetition_penalty": 1.3, "presence_penalty": 0.5}),
        (own(17), drawn | {"max_tokens": 22, "seed": 2, "min_p": 0.05}),
        (twice[:1], drawn | {"max_tokens": 36, "seed": 3}),
        (own(64), drawn | {"max_tokens": 7, "seed": 4, "top_k": 8, "ignore_eos": False}),
        (own(65), greedy | {"max_tokens": 8, "logit_bias": {11: 2.0, 12: -3.0}}),
        (twice, greedy | {"max_tokens": 12, "logprobs": 3}),
        (own(30), greedy | {"max_tokens": 10, "prompt_logprobs": 2}),
        (own(150), greedy | {"max_tokens": 10}),
        (shared, greedy | {"max_tokens": 18, "frequency_penalty": 0.7, "min_tokens": 3}),
        (shared + own(11), drawn | {"max_tokens": 14, "seed": 5, "logprobs": 1}),
    ]
    # Parts from the long prompt in the middle of a block.
    table.append((table[LONG_PROMPT][0][:130] + own(3), greedy | {"max_tokens": 6}))
    jobs = []
    for i, (ids, params) in enumerate(table):
        params = {"ignore_eos": True} | params
        if n > 1 and i % 2 == 0:
            params |= {"n": n, "temperature": 0.9, "seed": params.get("seed", 100 + i)}
        jobs.append(Job(ids, SamplingParams(**params)))
    return jobs


# ---- one cell --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One configuration: tokens per chunk (0: whole prompts), prefix cache, pool, completions."""

    chunk: int
    cache: str
    pool: str
    n: int

    def __str__(self) -> str:
        return f"{self.chunk or 'whole'}-{self.cache}-{self.pool}-n{self.n}"

    @property
    def num_blocks(self) -> int:
        """Enough for everybody, or for about half of those who could run."""
        return 300 if self.pool == "ample" else TIGHT[self.n]

    def open(self, model: str | Path, dtype: str = "float32", **more: Any) -> LLM:
        """The engine of this cell."""
        return LLM(
            model,
            dtype=dtype,
            block_size=BLOCK,
            max_model_len=LONGEST,
            max_num_seqs=SEATS,
            num_gpu_blocks_override=self.num_blocks,
            long_prefill_token_threshold=self.chunk,
            swap_space=2**-7 if self.pool == "swap" else 0,
            **(
                {"enable_prefix_caching": False}
                if self.cache == "off"
                else {"prefix_cache": self.cache}
            ),
            **more,
        )


TIGHT = {1: 54, 3: 62}
CHUNKS, CACHES = (1, 7, 64, 0), ("off", "hash", "radix")
POOLS, COUNTS = ("ample", "recompute", "swap"), (1, 3)
MATRIX = [Cell(*each) for each in itertools.product(CHUNKS, CACHES, POOLS, COUNTS)]


def pairwise_cells(turn: int) -> list[Cell]:
    """12 cells in which any two settings of any two axes meet; `turn` chooses other cells."""
    return [
        Cell(chunk, cache, POOLS[(i + j + turn) % 3], COUNTS[(i + j + turn) % 2])
        for i, chunk in enumerate(CHUNKS)
        for j, cache in enumerate(CACHES)
    ]


@dataclass
class Run:
    """What a cell gave back, and what its plans were seen to do."""

    llm: LLM
    first: list[RequestOutput]
    again: list[RequestOutput]
    longest_row: int = 0
    num_swapped_in: int = 0
    jobs: list[Job] = field(default_factory=list)


def run_cell(cell: Cell, model: str | Path, dtype: str = "float32", **more: Any) -> Run:
    """All requests at once, then some of them again, if there is a cache to find them in."""
    llm = cell.open(model, dtype, **more)
    run = Run(llm, [], [], jobs=jobs_of(llm, cell.n))
    launch = llm.engine.runner.launch

    def watched(plan: StepPlan):
        run.longest_row = max(run.longest_row, *(row.num_tokens for row in plan.rows))
        run.num_swapped_in += len(plan.swap_in)
        return launch(plan)

    llm.engine.runner.launch = watched  # type: ignore[method-assign]
    run.first = generate(llm, run.jobs[:SECOND_ONLY])
    if cell.cache != "off":
        run.again = generate(llm, [run.jobs[i] for i in AGAIN])
    return run


def generate(llm: LLM, jobs: list[Job]) -> list[RequestOutput]:
    """All of these together."""
    prompts = [list(job.ids) for job in jobs]
    return llm.generate(prompts, [job.params for job in jobs], use_tqdm=False)


# ---- equal -----------------------------------------------------------------------------------


class Reference:
    """Each request alone: whole prompt, no prefix cache, more blocks than it can use."""

    def __init__(self, model: str | Path, n: int):
        self.llm = LLM(
            model,
            dtype="float32",
            block_size=BLOCK,
            max_model_len=LONGEST,
            max_num_seqs=n,
            num_gpu_blocks_override=300,
            enable_prefix_caching=False,
        )
        self.jobs = jobs_of(self.llm, n)
        self.outputs = [generate(self.llm, [job])[0] for job in self.jobs]
        counters = self.llm.engine.scheduler.counters
        assert counters.num_mixed_steps == counters.num_recomputed_tokens == 0
        assert counters.max_num_running == n

    def differences(self, run: Run) -> tuple[list[str], list[str]]:
        """What differs from the reference: real differences, and those at a near tie."""
        pairs = [*zip(range(SECOND_ONLY), run.first, strict=True)]
        pairs += zip(AGAIN if run.again else (), run.again, strict=True)
        found: list[str] = []
        excused: list[str] = []
        for index, output in pairs:
            mine = self.outputs[index]
            for one, other in zip(mine.outputs, output.outputs, strict=True):
                place = f"request {index}, completion {one.index}"
                step = first_difference(one, other)
                if step is None:
                    found += [f"{place}: {text}" for text in unequal(one, other)]
                elif self.near_tie(index, one, other, step):
                    excused.append(f"{place}: near tie at token {step}")
                else:
                    found.append(f"{place}: token {step} of {len(one.token_ids)}")
            found += [
                f"request {index}: prompt logprobs: {text}"
                for text in unequal_logprobs(mine.prompt_logprobs, output.prompt_logprobs)
            ]
        return found, excused

    def near_tie(
        self, index: int, one: CompletionOutput, other: CompletionOutput, step: int
    ) -> bool:
        """Whether the reference would have chosen the other's token, had the model's logit of it
        been higher by MARGIN. For a greedy request that is DESIGN's "the top-2 margin is under
        1e-4", after its edits; for a drawn one it is the margin with the noise."""
        if step >= min(len(one.token_ids), len(other.token_ids)):
            return False
        logits = self.logits(index, list(one.token_ids[:step]))
        logits[0, other.token_ids[step]] += MARGIN
        return (
            self.choose(index, one.index, list(one.token_ids[:step]), logits)
            == (other.token_ids[step])
        )

    def request(self, index: int) -> Request:
        """The engine's view of a job: with its stop tokens and its seed."""
        job = self.jobs[index]
        return self.llm.engine.make_request("x", None, job.ids, job.params)

    def logits(self, index: int, generated: list[int]) -> torch.Tensor:
        """[1, V] after the prompt and these tokens, all computed at once in one block."""
        ids = [*self.jobs[index].ids, *generated]
        forward = self.llm.engine.forward_pass
        return forward.run([Chunk(0, 0, ids)], forward.allocate(1, len(ids)))[1].clone()

    def choose(
        self,
        index: int,
        sample_index: int,
        generated: list[int],
        logits: torch.Tensor,
        params: SamplingParams | None = None,
    ) -> int:
        """The token that the sampler takes from these logits, with these parameters or its own."""
        request = self.request(index)
        row = SamplingRow(
            params=params or request.params,
            seed=request.seed,
            sample_index=sample_index,
            position=len(request.prompt_token_ids) + len(generated),
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=generated,
            stop_ids=request.stop_ids,
        )
        return sample(logits, [row]).token_ids[0]


def first_difference(one: CompletionOutput, other: CompletionOutput) -> int | None:
    """The first token that differs; where one ends earlier, that is behind its end."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    for step, (mine, theirs) in enumerate(pairs):
        if mine != theirs:
            return step
    shorter, longer = sorted((len(one.token_ids), len(other.token_ids)))
    return None if shorter == longer else shorter


def unequal(one: CompletionOutput, other: CompletionOutput) -> list[str]:
    """What differs between two completions of the same tokens."""
    found = [
        f"{name} is {getattr(other, name)!r}, not {getattr(one, name)!r}"
        for name in ("text", "finish_reason", "stop_reason", "error")
        if getattr(one, name) != getattr(other, name)
    ]
    return found + unequal_logprobs(one.logprobs, other.logprobs)


def unequal_logprobs(
    one: list[Logprobs | None] | list[Logprobs] | None,
    other: list[Logprobs | None] | list[Logprobs] | None,
) -> list[str]:
    """Where two lists of log-probabilities differ by more than the margin."""
    if one is None or other is None or len(one) != len(other):
        return [] if one is other is None else ["lists of different lengths"]
    return [
        f"logprobs at {place}"
        for place, (mine, theirs) in enumerate(zip(one, other, strict=True))
        if not close(mine, theirs)
    ]


def close(one: Logprobs | None, other: Logprobs | None) -> bool:
    """The same first token, and the same values for the tokens that both name; of two equally
    probable tokens at the end of the list either may be there."""
    if not one or not other:
        return one == other
    both = one.keys() & other.keys()
    same_first = next(iter(one)) == next(iter(other))
    values = sorted(entry.logprob for entry in one.values())
    others = sorted(entry.logprob for entry in other.values())
    return (
        same_first
        and len(values) == len(others)
        and all(abs(a - b) < MARGIN for a, b in zip(values, others, strict=True))
        and all(abs(one[i].logprob - other[i].logprob) < MARGIN for i in both)
    )
