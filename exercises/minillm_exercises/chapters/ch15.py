"""Chapter 15: formats of cached keys and values, the requests of a pool, the time of reading."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minillm import LLM, ops
from minillm.cache.spec import CacheSpec, cache_spec
from minillm.lab.simulation import Simulation
from minillm.lab.training.attention import CausalRows
from minillm.lab.training.trainer import rows_batch
from minillm.layers.kv_cache import KVCache
from minillm.models.forward_pass import Chunk, ForwardPass
from minillm.models.presets import preset
from minillm.ops import cpu
from minillm.ops.batch import Batch
from minillm_exercises import measure
from minillm_exercises.chapters.common import show_table as show_table
from minillm_exercises.chapters.quality import Quality, Subject

REAL = Path(__file__).with_name("ch15_smollm2.json")
REAL_LAYER = 12
BLOCK = 16  # positions
ROTATED = 96 * 2**20  # bytes of each kind of cache that are read in turn, so that no cache of the
# processor holds them
Rounding = Callable[[Tensor], Tensor]  # of keys or values [positions, KV heads, D]
ALL, TOKEN, HEAD, CHANNEL = (0, 1, 2), (1, 2), 2, 0  # what shares a step, as dimensions


class Kind(NamedTuple):
    """A format of the cache: its bits for a number, scales included, and how it rounds."""

    name: str
    bits: float
    key: Rounding
    value: Rounding


EXACT = Kind("16 bits", 16, lambda x: x, lambda x: x)


def fp8(x: Tensor, shared: Any) -> Tensor:
    """Numbers of 8 bits with an exponent (e4m3); what shares a scale has its largest at 448."""
    scale = x.abs().amax(shared, keepdim=True).clamp(min=1e-30) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def between(x: Tensor, shared: Any, bits: int = 4) -> Tensor:
    """Whole steps from the lowest to the highest number of what shares a step."""
    low, high = x.amin(shared, keepdim=True), x.amax(shared, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-30)
    return low + ((x - low) / step).round() * step


def in_blocks(x: Tensor, rounding: Rounding, size: int = BLOCK) -> Tensor:
    """`rounding` of each block of positions by itself; the last one may be shorter."""
    return torch.cat([rounding(block) for block in x.split(size)])


def uniform(x: Tensor, shared: Any, bits: int = 8) -> Tensor:
    """Whole steps on both sides of 0; the largest number of what shares a step is 127 of them."""
    most = 2 ** (bits - 1) - 1
    step = (x.abs().amax(shared, keepdim=True) / most).clamp(min=1e-30)
    return (x / step).round() * step


def kinds(dim: int, heads: int) -> list[Kind]:
    """The formats that are compared, for so many KV heads of so many dimensions."""

    def same(name: str, bits: float, rounding: Rounding) -> Kind:
        return Kind(name, bits, rounding, rounding)

    def int8(x: Tensor) -> Tensor:
        return uniform(x, HEAD)

    def int4(x: Tensor) -> Tensor:
        return between(x, HEAD)

    def blocks(x: Tensor) -> Tensor:
        return in_blocks(x, lambda block: between(block, CHANNEL))

    own, pair = 16 / dim, 32 / dim  # bits of a scale, and of a step with the lowest number
    return [
        same("int8, all tokens", 8, lambda x: uniform(x, ALL)),
        same("int8, token", 8 + own / heads, lambda x: uniform(x, TOKEN)),
        same("int8, token and head", 8 + own, int8),
        same("int8, channel", 8, lambda x: uniform(x, CHANNEL)),
        same("fp8, all tokens", 8, lambda x: fp8(x, ALL)),
        same("fp8, token and head", 8 + own, lambda x: fp8(x, HEAD)),
        same("int4, token and head", 4 + pair, int4),
        Kind("int4 keys by channel", 4 + 16 / BLOCK + pair / 2, blocks, int4),
        Kind("int8 keys, int4 values", 6 + (own + pair) / 2, int8, int4),
        Kind("int4 keys alone", 10 + pair / 2, int4, EXACT.value),
        Kind("int4 values alone", 10 + pair / 2, EXACT.key, int4),
    ]


# What a model says with a rounded cache ----------------------------------------------------------


class RoundedRows(CausalRows):
    """Attention over keys and values that were rounded when they were written."""

    def __init__(self, length: int, kind: Kind) -> None:
        super().__init__(length)
        self.kind = kind
        self.seen: list[tuple[Tensor, Tensor]] = []  # of each layer, before rounding

    def write(self, layer: int, key: Tensor, value: Tensor | None, batch: Batch) -> None:
        """Keep rounded keys and values [positions, KV heads, D] for the following `attend`."""
        value = key if value is None else value  # MLA, which no model here has
        self.seen.append((key, value))
        super().write(layer, self.kind.key(key), self.kind.value(value), batch)


@torch.no_grad()
def run(subject: Subject, ids: Sequence[int], kind: Kind) -> tuple[Tensor, RoundedRows]:
    """Logarithmic distributions [T, V] with a cache of this kind, and the cache."""
    rows = RoundedRows(len(ids), kind)
    hidden = subject.model(rows_batch(torch.tensor(ids), len(ids)), rows)
    return subject.model.logits(hidden).float().log_softmax(-1), rows


def judge(subject: Subject, kind: Kind) -> Quality:
    """How far the model is from itself if its cache is of this kind."""
    return subject.quality([run(subject, ids, kind)[0] for ids in subject.windows])


@torch.no_grad()
def judge_engine(subject: Subject) -> Quality:
    """The same for the engine's own cache of 8 bits, which rounds queries and weights, too."""
    config, run, dists = subject.model.config, ForwardPass(subject.model), []
    for ids in subject.windows:
        kv = KVCache(cache_spec(config, "int8"), config.num_layers, 1, len(ids), torch.float32)
        hidden, _ = run.run([Chunk(0, 0, ids)], kv)
        dists.append(run.logits(hidden).float().log_softmax(-1))
    return subject.quality(dists)


def cached(subject: Subject) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [512, KV heads, D] of each layer over the first window."""
    return run(subject, subject.windows[0], EXACT)[1].seen


def largest(x: Tensor) -> Tensor:
    """The largest |x| of each channel of each head, largest first."""
    return x.abs().amax(0).flatten().sort(descending=True).values


def spread(x: Tensor) -> float:
    """The largest channel of a head over its middle one; the mean over all heads."""
    channels = x.abs().amax(0)  # [KV heads, D]
    return float((channels.amax(-1) / channels.median(-1).values).mean())


def measure_real(name: str, kinds: Sequence[Kind]) -> dict[str, Any]:
    """What `REAL` holds, for the model `name`. Some minutes."""
    subject = Subject(name)
    seen = cached(subject)
    shown = dict(zip(("keys", "values"), seen[REAL_LAYER], strict=True))
    found = {kind.name: judge(subject, kind) for kind in kinds}
    own = judge_engine(subject)
    return {
        "model": name,
        "largest": {
            each: [float(f"{value:.3g}") for value in largest(x)] for each, x in shown.items()
        },
        "spread": {
            each: [float(f"{spread(pair[place]):.3g}") for pair in seen]
            for place, each in enumerate(("keys", "values"))
        },
        "kl": {each: float(f"{quality.kl:.3g}") for each, quality in found.items()},
        "same": {each: float(f"{quality.same:.4g}") for each, quality in found.items()},
        "engine": {"kl": float(f"{own.kl:.3g}"), "same": float(f"{own.same:.4g}")},
    }


def real() -> dict[str, Any]:
    """`measure_real("smollm2", kinds(64, 3))`, as it was measured by
    `python -m minillm_exercises.chapters.ch15`; `make test-external` measures parts of it again."""
    return json.loads(REAL.read_text(encoding="utf-8"))


def attend(kind: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The engine's attention of the last positions, query [T, H, D] over keys and values
    [S, KV heads, D], which are written to its cache of that kind ("auto" or "int8") -> [T, H, D]"""
    length, heads, dim = key.shape
    count = -(-length // BLOCK)
    kv = KVCache(CacheSpec(heads, dim, dim, int8=kind == "int8"), 1, count, BLOCK, query.dtype)
    none, rows = torch.empty(0, dtype=torch.int64), torch.tensor([0, len(query)]).int()
    batch = Batch(none, none, torch.arange(length), rows, torch.tensor([length]).int(),
                  torch.arange(count)[None], none, len(query))  # fmt: skip
    kv.write(0, key, value, batch)
    return kv.attend(0, query, batch, dim**-0.5, None)


# How many requests a pool holds ------------------------------------------------------------------


def pool(kind: str, num_bytes: int) -> tuple[int, int]:
    """Blocks of `tiny`'s engine with a cache of that size ("auto": 16 bits), and bytes of a
    token."""
    with LLM("tiny", device="cpu", dtype="bfloat16", block_size=BLOCK, max_model_len=1024,
             kv_cache_dtype=kind, kv_cache_memory_bytes=num_bytes) as llm:  # fmt: skip
        return llm.engine.scheduler.blocks.pool.num_blocks, llm.plan().kv_bytes_per_token


def running(blocks: int, requests: int, prompt: int, new: int) -> list[int]:
    """Simulated with the engine's scheduler: the requests that run in each step, all sent at
    once."""
    simulation = Simulation(blocks, BLOCK, max_num_batched_tokens=2048)
    for _ in range(requests):
        simulation.add(prompt, new)
    return [len(record.rows) for record in simulation.run()]


# The time of reading -----------------------------------------------------------------------------


def is_fast() -> bool:
    """Whether this machine has C functions that read 16-bit pages and pages of codes."""
    return cpu.functions(torch.bfloat16) is not None


def contexts() -> list[int]:
    """Contexts that are timed, in tokens."""
    return [2**n for n in range(7, 15 if is_fast() else 11)]


class Reader:
    """One layer's attention of a decode step, for the shape of a model, over a full cache."""

    def __init__(self, kind: str, name: str = "qwen3-0.6b") -> None:
        self.config = preset(name)
        spec = cache_spec(self.config, kind)
        block_bytes = spec.block_bytes(BLOCK, 2)
        self.token_bytes = block_bytes // BLOCK
        count = ROTATED // block_bytes if is_fast() else 64
        self.kv = KVCache(spec, 1, count, BLOCK, torch.bfloat16)
        generator = torch.Generator().manual_seed(15)
        for pages in self.kv.tensors:
            if pages.dtype in (torch.uint8, torch.int8):
                pages.random_(1, 127, generator=generator)
            else:
                pages.fill_(0.01) if pages.dtype == torch.float16 else pages.normal_(
                    generator=generator
                )
        self.order = torch.randperm(count, generator=generator)
        heads, dim = self.config.num_heads, self.config.head_dim
        self.query = torch.randn(1, heads, dim, generator=generator).bfloat16()

    def seconds(self, context: int) -> float:
        """The shortest time of a token with so many positions; the tables of as many sequences as
        the cache holds are read in turn."""
        tables = self.order[: len(self.order) // (context // BLOCK) * (context // BLOCK)]
        none = torch.empty(0, dtype=torch.int64)
        starts, lengths = torch.tensor([0, 1]).int(), torch.tensor([context]).int()
        batches = [
            Batch(none, none, none, starts, lengths, table[None], none, 1)
            for table in tables.view(-1, context // BLOCK)
        ]
        scale = self.config.head_dim**-0.5

        def every() -> None:
            for batch in batches:
                ops.paged_attention(self.query, self.kv.pages[0], batch, scale)

        with torch.inference_mode():
            return min(measure(every, repeats=9, budget=0.5).times) / len(batches)


def bounds(
    readers: Mapping[str, Reader], contexts: Sequence[int], bandwidth: float,
    took: Mapping[str, Sequence[float]],
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds in which the bytes of each context can be read, at the highest rate that is known:
    `bandwidth`, or that of a measured time."""
    for name, reader in readers.items():
        rates = (
            reader.token_bytes * context / time
            for context, time in zip(contexts, took[name], strict=True)
        )
        bandwidth = max(bandwidth, *rates)
    return {
        name: [reader.token_bytes * context / bandwidth for context in contexts]
        for name, reader in readers.items()
    }


if __name__ == "__main__":
    made = measure_real("smollm2", kinds(64, 3))
    REAL.write_text(json.dumps(made) + "\n", encoding="utf-8")
