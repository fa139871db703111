"""Chapter 19: ranks that are threads, who holds what, sums in several orders, and what a sum costs."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fractions import Fraction
from math import exp, log
from typing import Any, TypeVar

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.config import ModelConfig
from minillm.cost import kv_bytes_per_token, step_cost
from minillm.hardware import Hardware
from minillm.linear_methods import Matrix
from minillm.ops.philox import Purpose, random_words_of_vocabulary, to_gumbel
from minillm.parallel import sampler
from minillm.parallel.communicator import Communicator
from minillm.parallel.split import Split, rank_config
from minillm.parallel.threads import ThreadGroup
from minillm_exercises.chapters.common import nearest as nearest
from minillm_exercises.chapters.common import show_table as show_table
from minillm_exercises.chapters.common import your_turn as your_turn

T = TypeVar("T")
SumSeconds = Callable[[int, int], float]  # ranks, bytes that each brings -> seconds
CONTEXT = 1024  # tokens in the cache of each sequence of a decode step

# Seconds of a sum between H100s over NVLink by bytes, as others measured it with kernels made for
# it (the pull request that brought them to SGLang, sgl-project/sglang 2904): ranks -> microseconds.
SIZES = (4 * 1024, 32 * 1024, 256 * 1024, 1024 * 1024)
NVLINK = {2: (3.9, 4.5, 7.9, 19.9), 4: (3.7, 4.8, 13.9, 31.1), 8: (5.7, 7.8, 16.7, 33.8)}
NVLINK_BANDWIDTH = 420e9  # bytes per second of large sums, in the middle of what is reported


# Ranks ---------------------------------------------------------------------------------------


def on_ranks(size: int, call: Callable[[Communicator], T]) -> list[T]:
    """What `call` returns on each of so many ranks, which are threads of this process."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, ThreadGroup(size, patience=60).communicators()))


def open_ranks(model: str, size: int, backend: str = "threads", **options: Any) -> LLM:
    """An engine of so many ranks, in float32, so that tokens can be compared."""
    more = {"tensor_parallel_size": size, "distributed_executor_backend": backend}
    return LLM(model, dtype="float32", **{**more, **options})


def write(llm: LLM, prompt: Sequence[int], count: int, **params: Any) -> list[int]:
    """The tokens that `llm` writes after `prompt`, greedily unless `params` say otherwise."""
    options = SamplingParams(
        **{"temperature": 0.0, "ignore_eos": True, "seed": 0, "max_tokens": count} | params
    )
    out = llm.generate([{"prompt_token_ids": list(prompt)}], options, use_tqdm=False)[0]
    return list(out.outputs[0].token_ids)


def communicators(llm: LLM) -> Sequence[Communicator]:
    """Those of the engine's ranks, which are threads."""
    found: Sequence[Communicator] = llm.engine.runner.communicators  # type: ignore[attr-defined]
    return found


def per_token(llm: LLM, prompt: Sequence[int], count: int, **params: Any) -> dict[str, Fraction]:
    """What rank 0 asks of the others for each token that is written behind the prompt: sums and
    gathers, and the bytes that it brings to them. Two texts that differ only in their length are
    written, and the difference counts, so that the prompt does not."""
    counted = []
    for tokens in (1, 1 + count):
        rank = communicators(llm)[0]
        rank.forget_traffic()
        write(llm, prompt, tokens, **params)
        counted.append(rank.traffic)
    before, after = counted
    return {
        f"{kind} {what}": Fraction(getattr(after[kind], what) - getattr(before[kind], what), count)
        for kind in after
        for what in ("calls", "num_bytes")
    }


# Who holds what ------------------------------------------------------------------------------


def held(llm: LLM, rank: int, layer: int = 0) -> list[list[str]]:
    """What a rank holds of the embedding and of one layer: rows of [name, whole matrix, rows,
    columns]."""
    model = llm.engine.runner.runners[rank].model  # type: ignore[attr-defined]
    rows = []
    for name, matrix in model.named_modules():
        if isinstance(matrix, Matrix) and name.startswith(("embedding", f"layers.{layer}.")):
            for part in matrix.parts:
                high, wide = part.shape
                cut = [span(part.rows, high), span(part.columns, wide)]
                rows.append([f"`{part.name.split('.')[-1]}`", f"{high} × {wide}", *cut])
    return rows


def span(held: range, total: int) -> str:
    """A range as a reader writes it."""
    return "all" if len(held) == total else f"{held.start} to {held.stop - 1}"


def heads_table(config: ModelConfig, sizes: Sequence[int]) -> list[list[str]]:
    """For each number of ranks: the query heads and the KV heads of every rank, and the bytes that
    a token takes in the cache of one rank."""
    rows = []
    for size in sizes:
        splits = [Split(rank, size) for rank in range(size)]
        queries = " \\| ".join(numbers(each.share(config.num_heads)) for each in splits)
        keys = " \\| ".join(numbers(each.kv_heads(config.num_kv_heads)) for each in splits)
        cache = kv_bytes_per_token(rank_config(config, size), "bfloat16")
        rows.append([f"{size}", queries, keys, f"{cache:,}"])
    return rows


def numbers(held: range) -> str:
    """0, 1, 2"""
    return ", ".join(map(str, held))


# Bugs to look at -----------------------------------------------------------------------------


@contextmanager
def heads_in_turn() -> Iterator[None]:
    """Rank r holds KV head r mod (KV heads), where there are more ranks than KV heads."""
    right = Split.kv_heads

    def wrong(self: Split, num_kv_heads: int) -> range:
        if self.size <= num_kv_heads:
            return right(self, num_kv_heads)
        return range(self.rank % num_kv_heads, self.rank % num_kv_heads + 1)

    Split.kv_heads = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        Split.kv_heads = right  # type: ignore[method-assign]


@contextmanager
def local_noise() -> Iterator[None]:
    """Every rank numbers its tokens from 0 when it draws."""
    right = sampler.draw_from_shard

    def wrong(logits: Tensor, pack: Any, before: int, *rest: Any) -> tuple[Tensor, Tensor]:
        return right(logits, pack, 0, *rest)

    sampler.draw_from_shard = wrong
    try:
        yield
    finally:
        sampler.draw_from_shard = right


# Tokens --------------------------------------------------------------------------------------


def noise(rows: int, vocab_size: int) -> Tensor:
    """The engine's Gumbel noise of every token, at so many positions: [rows, V]."""
    zeros = torch.zeros(rows, dtype=torch.int64)
    words = random_words_of_vocabulary(
        zeros, zeros, torch.arange(rows), int(Purpose.SAMPLE), vocab_size
    )
    return to_gumbel(words)


def law_of_local_noise(p: Sequence[Fraction], size: int) -> list[Fraction]:
    """The law of the token where every rank draws the noise of its own places: tokens at the same
    place share their noise, so the likelier one always beats the other, and the places are drawn
    by the likeliest token of each."""
    each = len(p) // size
    law = [Fraction(0)] * len(p)
    rivals = [range(place, len(p), each) for place in range(each)]
    top = [max(group, key=lambda token: p[token]) for group in rivals]
    for token in top:
        law[token] = p[token] / sum(p[t] for t in top)
    return law


def distance(one: Sequence[Fraction], other: Sequence[Fraction]) -> Fraction:
    """Total variation: the largest error in the probability of any set of tokens."""
    return sum((abs(a - b) for a, b in zip(one, other, strict=True)), Fraction(0)) / 2


# Sums ----------------------------------------------------------------------------------------


def parts_of(size: int, rows: int, width: int = 96) -> Tensor:
    """Numbers that ranks might add up, the same on every machine: float32 [size, rows, width]."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.rand(2, size, rows, width, generator=generator)
    return (left - 0.5) * right  # all bits in use, so that additions have to round


def changed(add_up: Callable[[Tensor], Tensor], size: int, rows: int = 64) -> int:
    """Percent of the values of one row that differ where the row is added up alone and where it is
    among `rows` of them; the mean over all rows."""
    parts = parts_of(size, rows)
    together = add_up(parts)
    alone = torch.cat([add_up(parts[:, row : row + 1]) for row in range(rows)])
    return round(100 * float((together != alone).double().mean()))


# What a sum costs ----------------------------------------------------------------------------


def nvlink(ranks: int, num_bytes: int) -> float:
    """Seconds of a sum over NVLink: between measured points on logarithmic scales, behind the last
    one by bandwidth."""
    micros = NVLINK[ranks]
    if num_bytes >= SIZES[-1]:
        moved = 2 * (ranks - 1) / ranks * (num_bytes - SIZES[-1])
        return micros[-1] * 1e-6 + moved / NVLINK_BANDWIDTH
    if num_bytes <= SIZES[0]:
        return micros[0] * 1e-6
    at = next(i for i in range(len(SIZES)) if num_bytes < SIZES[i]) - 1
    share = log(num_bytes / SIZES[at]) / log(SIZES[at + 1] / SIZES[at])
    return 1e-6 * exp((1 - share) * log(micros[at]) + share * log(micros[at + 1]))


def sums_per_step(config: ModelConfig) -> int:
    """One behind the attention and one behind the MLP of each layer, one for the embedding."""
    return 2 * config.num_layers + 1


def step_seconds(
    config: ModelConfig,
    gpu: Hardware,
    ranks: int,
    sum_seconds: SumSeconds,
    batch: int,
    new: int = 1,
    context: int = CONTEXT,
) -> float:
    """A lower bound of a step in bfloat16: `new` tokens of each of `batch` sequences that have
    `context` tokens then. Each rank does its share, and the sums come on top; the choice of tokens
    is left out."""
    cost = step_cost(config, [new] * batch, [context] * batch, dtype="bfloat16")
    work = max(cost.total_bytes / gpu.bandwidth, cost.flops / gpu.rate("bfloat16")) / ranks
    if ranks == 1:
        return work
    num_bytes = batch * new * config.hidden_size * 2
    return work + sums_per_step(config) * sum_seconds(ranks, num_bytes)


def speed_up(config: ModelConfig, gpu: Hardware, ranks: int, *step: Any, **more: Any) -> float:
    """Times as fast as one GPU that is large enough."""
    alone = step_seconds(config, gpu, 1, *step, **more)
    return alone / step_seconds(config, gpu, ranks, *step, **more)


def rounded(value: Fraction | float, digits: int = 1) -> str:
    """A number with so many decimals, for a fact."""
    return f"{float(value):.{digits}f}"
