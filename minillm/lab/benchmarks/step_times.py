"""Times of engine steps, for engines with the same weights that run in turn.

Every turn of an engine decodes a few tokens of each sequence of a batch, or computes one prompt. A
time is the median over the turns; a ratio compares neighbouring turns, because disturbances affect
both of them.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from minillm.api.sampling_params import SamplingParams
from minillm.llm import LLM

WARM_UP = 3  # steps that are not timed


@dataclass(frozen=True)
class Sizes:
    """Sizes and repetitions: decode steps of each batch size, and prompts of one length."""

    batches: tuple[int, ...]
    context: int = 128
    steps: int = 8  # of a turn
    turns: int = 7
    prefill: int = 256  # tokens


@dataclass(frozen=True)
class Times:
    """Seconds of one kind of step, by turn: of the first engine, and of another one."""

    step: str
    engine: str
    base: tuple[float, ...]
    own: tuple[float, ...]

    @property
    def ratio(self) -> tuple[float, float, float]:
        """First quartile, median and third quartile of the ratios of neighbouring turns, own over
        base."""
        ratios = [own / base for base, own in zip(self.base, self.own, strict=True)]
        low, middle, high = quantiles(ratios)
        return low, middle, high

    def as_json(self) -> dict[str, Any]:
        """All turns, and the ratio."""
        return asdict(self) | {"ratio": self.ratio}

    def row(self, inverse: bool = False) -> list[str]:
        """Cells: step, engine, milliseconds of both, the median of the ratios (`inverse`: the
        speed-up, base over own) and its quartiles."""
        low, middle, high = [1 / x for x in self.ratio[::-1]] if inverse else self.ratio
        base, own = (f"{median(times) * 1e3:,.1f}" for times in (self.base, self.own))
        return [self.step, self.engine, base, own, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]


@contextmanager
def opened(
    model: str, dtype: str, sizes: Sizes, variants: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, LLM]]:
    """An engine for each variant of the arguments, without a prefix cache, so that every prompt is
    computed; with random weights, except for `tiny`."""
    engines: dict[str, LLM] = {}
    try:
        for name, fields in variants.items():
            engines[name] = LLM(
                model,
                dtype=dtype,
                device="cpu",
                load_format="auto" if model == "tiny" else "dummy",
                max_model_len=max(sizes.context + sizes.steps + 32, sizes.prefill + 1),
                kv_cache_memory_bytes=2**29,
                max_num_seqs=max(sizes.batches),
                max_num_batched_tokens=max(2048, sizes.context * max(sizes.batches)),
                enable_prefix_caching=False,
                **fields,
            )
        yield engines
    finally:
        for llm in engines.values():
            llm.close()


def measure(engines: Mapping[str, LLM], sizes: Sizes) -> Iterator[Times]:
    """All kinds of steps, of every engine after the first beside the first."""
    for batch in sizes.batches:
        turns = [
            [decode_turn(llm, batch, sizes) for llm in engines.values()] for _ in range(sizes.turns)
        ]
        yield from beside_first(f"decode, {batch}", list(engines), turns)
    turns = [[prefill_turn(llm, sizes) for llm in engines.values()] for _ in range(sizes.turns + 1)]
    yield from beside_first(f"prefill, {sizes.prefill}", list(engines), turns[1:])


def beside_first(step: str, names: Sequence[str], turns: Sequence[list[float]]) -> Iterator[Times]:
    """The turns of every engine after the first, beside those of the first."""
    base, *others = zip(*turns, strict=True)
    for name, own in zip(names[1:], others, strict=True):
        yield Times(step, name, base, own)


def decode_turn(llm: LLM, batch: int, sizes: Sizes) -> float:
    """Mean seconds per token of each sequence. Tokens are counted, because a step of a pipeline
    advances only a part of the sequences. At the end nothing is in flight, so that nothing runs
    during another engine's turn."""
    names = [f"decode {place}" for place in range(batch)]
    for name in names:
        add(llm, name, sizes.context, sizes.steps + WARM_UP * 8)
    for _ in range(WARM_UP):
        llm.engine.step()
    before, taken = num_tokens(llm), 0.0
    while num_tokens(llm) - before < batch * sizes.steps:
        taken += timed(llm)
    found = taken * batch / (num_tokens(llm) - before)
    for name in names:
        llm.engine.abort(name)
    return found


def prefill_turn(llm: LLM, sizes: Sizes) -> float:
    """Seconds of the step of one prompt."""
    add(llm, "prefill", sizes.prefill, 1)
    return timed(llm)


def add(llm: LLM, name: str, length: int, max_tokens: int) -> None:
    """Add a greedy request with a prompt of `length` tokens."""
    width = llm.engine.source.config.vocab_size
    ids = [(7919 * place + len(name)) % width for place in range(length)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    llm.engine.add(llm.engine.make_request(name, None, ids, params))


def timed(llm: LLM) -> float:
    """Seconds of a step, with garbage collection off."""
    gc.disable()
    start = perf_counter()
    llm.engine.step()
    taken = perf_counter() - start
    gc.enable()
    return taken


def num_tokens(llm: LLM) -> int:
    """Number of tokens of all running sequences."""
    return sum(len(each.token_ids) for each in llm.engine.scheduler.sequences.values())
