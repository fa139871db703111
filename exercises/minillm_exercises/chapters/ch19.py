"""Chapter 19: ranks that are threads, who holds what, sums in several orders, and their cost."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from math import log
from typing import Any, TypeVar

import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.lab.hardware import Hardware
from minillm.lab.links import LINKS
from minillm.lab.parallel_cost import Devices, ParallelTime, decode_time, prefill_time
from minillm.lab.parallel_layout import Layout, device_memory
from minillm.layers.linear_methods import Matrix
from minillm.ops.philox import Purpose, random_words_of_vocabulary, to_gumbel
from minillm.parallel import sampler
from minillm.parallel.communicator import Communicator, ThreadGroup
from minillm.parallel.split import Split, rank_config
from minillm.plan.cost import MemoryPlan, kv_bytes_per_token, weight_bytes
from minillm_exercises.chapters.ch02 import logprobs
from minillm_exercises.chapters.ch16 import distance as distance
from minillm_exercises.chapters.common import rounded as rounded
from minillm_exercises.chapters.common import show_table as show_table

T = TypeVar("T")
CONTEXT = 1024  # tokens in the cache of each sequence of a decode step
PROMPT = 2048


# Ranks ---------------------------------------------------------------------------------------


def on_ranks(size: int, call: Callable[[Communicator], T]) -> list[T]:
    """What `call` returns on each of so many ranks, which are threads of this process."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, ThreadGroup(size, patience=60).communicators()))


def share(communicator: Communicator, total: int) -> slice:
    """A rank's equal share of `total` rows or columns."""
    held = Split(communicator.rank, communicator.size).share(total)
    return slice(held.start, held.stop)


def open_ranks(model: str, size: int, backend: str = "threads", **options: Any) -> LLM:
    """An engine of so many ranks on the processor, in float32, so that tokens can be compared."""
    more = {"tensor_parallel_size": size, "distributed_executor_backend": backend}
    return LLM(model, dtype="float32", device="cpu", **{**more, **options})


def write(llm: LLM, prompt: Sequence[int], count: int, **params: Any) -> list[int]:
    """The tokens that `llm` writes after `prompt`, greedily unless `params` say otherwise."""
    options = SamplingParams(
        **{"temperature": 0.0, "ignore_eos": True, "seed": 0, "max_tokens": count} | params
    )
    out = llm.generate([{"prompt_token_ids": list(prompt)}], options, use_tqdm=False)[0]
    return list(out.outputs[0].token_ids)


def communicator(llm: LLM, rank: int = 0) -> Communicator:
    """That of one of the engine's ranks, which are threads."""
    found: Communicator = llm.engine.runner.runners[rank].sampler.communicator  # type: ignore
    return found


def bits(llm: LLM, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """How many bits the model needs for each token of a text behind the prompt, on average."""
    found = logprobs(llm, [*prompt, *tokens])[len(prompt) - 1 :]
    return -sum(found) / len(found) / log(2)


def per_token(llm: LLM, prompt: Sequence[int], count: int, **params: Any) -> dict[str, int]:
    """What rank 0 asks of the others for each token that is written behind the prompt: sums and
    gathers, and the bytes that it brings to them. Two texts that differ only in their length are
    written, and the difference counts, so that the prompt does not."""
    counted = []
    for tokens in (1, 1 + count):
        rank = communicator(llm)
        rank.forget_traffic()
        write(llm, prompt, tokens, **params)
        counted.append(rank.traffic)
    before, after = counted
    return {
        f"{kind} {what}": (getattr(after[kind], what) - getattr(before[kind], what)) // count
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
        keys = " \\| ".join(kv_heads(config, rank, size) for rank in range(size))
        rows.append([f"{size}", queries, keys, f"{cache_bytes(config, size):,}"])
    return rows


def cache_bytes(config: ModelConfig, size: int) -> int:
    """Bytes that a token takes in the cache of one of so many ranks, in bfloat16."""
    return kv_bytes_per_token(rank_config(config, size), "bfloat16")


def kv_heads(config: ModelConfig, rank: int, size: int) -> str:
    """The KV heads of a rank."""
    return numbers(Split(rank, size).kv_heads(config.num_kv_heads))


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

    sampler.draw_from_shard = wrong  # type: ignore[assignment]
    try:
        yield
    finally:
        sampler.draw_from_shard = right


# A class of an article -----------------------------------------------------------------------


def refused(model: str, size: int) -> bool:
    """Whether the engine refuses so many ranks."""
    try:
        open_ranks(model, size)
    except ConfigError:
        return True
    return False


# Tokens --------------------------------------------------------------------------------------


def noise(rows: int, vocab_size: int) -> Tensor:
    """The engine's Gumbel noise of every token, at so many positions: [rows, V]."""
    zeros = torch.zeros(rows, dtype=torch.int64)
    words = random_words_of_vocabulary(zeros, zeros, torch.arange(rows), Purpose.SAMPLE, vocab_size)
    return to_gumbel(words)


def dist_of_local_noise(p: Sequence[Fraction], size: int) -> list[Fraction]:
    """The distribution of the token where every rank draws the noise of its own places: tokens at
    the same place share their noise, so the likelier one always beats the other, and the places are
    drawn by the likeliest token of each."""
    each = len(p) // size
    dist = [Fraction(0)] * len(p)
    rivals = [range(place, len(p), each) for place in range(each)]
    top = [max(group, key=lambda token: p[token]) for group in rivals]
    for token in top:
        dist[token] = p[token] / sum(p[t] for t in top)
    return dist


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


def sums_per_step(config: ModelConfig) -> int:
    """One behind the attention and one behind the MLP of each layer, one for the embedding."""
    return 2 * config.num_layers + 1


def seconds(config: ModelConfig, gpu: Hardware, link: str, ranks: int, batch: int = 0) -> float:
    """The engine's prediction of a step in bfloat16, as a recorded graph: of `batch` sequences of
    `CONTEXT` tokens, or for batch 0 of a prompt of `PROMPT` tokens."""
    devices = Devices(gpu, LINKS[link], Layout(ranks), is_recorded=True)
    if batch:
        return decode_time(config, devices, batch=batch, context=CONTEXT, dtype="bfloat16").seconds
    return prefill_time(config, devices, num_tokens=PROMPT, dtype="bfloat16").seconds


def read_prompt(
    config: ModelConfig, gpu: Hardware, ranks: int, tokens: int = PROMPT, gigabytes: float = 25.0
) -> float:
    """The engine's prediction of a prompt of `tokens` tokens over PCIe of `gigabytes` (10^9 bytes
    per second), in seconds."""
    link = replace(LINKS["pcie"], bandwidth=1e9 * gigabytes)
    devices = Devices(gpu, link, Layout(ranks), is_recorded=True)
    return prefill_time(config, devices, num_tokens=tokens, dtype="bfloat16").seconds


def token(config: ModelConfig, gpu: Hardware, link: str, ranks: int) -> ParallelTime:
    """The engine's prediction of one token of one sequence: its time and its operations."""
    devices = Devices(gpu, LINKS[link], Layout(ranks), is_recorded=True)
    return decode_time(config, devices, batch=1, context=CONTEXT, dtype="bfloat16")


def room(
    config: ModelConfig, gpu: Hardware, tensor_parallel_size: int, **settings: Any
) -> MemoryPlan:
    """What one of so many ranks holds; `settings` are the engine's arguments."""
    return device_memory(config, gpu.memory_bytes, Layout(tensor_parallel_size), **settings)


def weight_gigabytes(config: ModelConfig) -> float:
    """All weights in bfloat16, in units of 10^9 bytes."""
    return weight_bytes(config, "bfloat16") / 1e9


def speed_up(config: ModelConfig, gpu: Hardware, link: str, ranks: int, batch: int = 0) -> float:
    """Times as fast as one GPU that is large enough."""
    alone, together = (seconds(config, gpu, link, size, batch) for size in (1, ranks))
    return alone / together


def holds(config: ModelConfig, gpu: Hardware, ranks: int, batch: int = 0) -> bool:
    """Whether so many GPUs hold the model in bfloat16 and the caches of a step of `seconds`."""
    tokens = batch * CONTEXT if batch else PROMPT
    return room(config, gpu, ranks, dtype="bfloat16").num_tokens >= tokens
