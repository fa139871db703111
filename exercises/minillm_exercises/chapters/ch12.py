"""Chapter 12: a decode step, what it calls, and the rungs from plain torch to one call."""

import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from minillm import LLM, SamplingParams
from minillm.lab import ceilings
from minillm.lab.hardware import Hardware
from minillm.layers.kv_cache import KVCache
from minillm.models.decoder import Decoder, LayersMethod
from minillm.models.forward_pass import Chunk
from minillm.models.packing import pack_weights
from minillm.ops import c_library, cpu
from minillm.ops.batch import Batch
from minillm.plan import machine
from minillm_exercises.chapters import common
from minillm_exercises.chapters.ch01 import product_pass as product_pass
from minillm_exercises.chapters.common import show_table as show_table
from minillm_exercises.timing import measure

PLAIN, PACKED, FUSED, WHOLE = "plain torch", "weights packed", "small operations in C", "one call"
CONTEXT = 32  # tokens before the one whose step is measured


# ---- a decode step, and what it calls --------------------------------------------------------


@dataclass(frozen=True)
class DecodeStep:
    """One decode step without scheduler and sampling: from a token to the logits of the next."""

    model: Decoder
    kv: KVCache
    batch: Batch

    @classmethod
    def of(cls, llm: LLM, token: int = 5) -> "DecodeStep":
        """The step of an engine's model after `CONTEXT` other tokens, which are in the cache."""
        bare = llm.engine.forward_pass
        kv = bare.allocate(1, 2 * CONTEXT)
        bare.run([Chunk(0, 0, list(range(CONTEXT)))], kv)
        batch = bare.batch([Chunk(0, CONTEXT, [token])], kv.block_size)
        return cls(bare.model, kv, batch)

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """[1, V]"""
        return self.model.logits(self.model(self.batch, self.kv))

    @torch.inference_mode()
    def use(self, token: int, position: int = CONTEXT) -> None:
        """Copy another token or position into the memory that the step reads."""
        self.batch.input_ids.fill_(token)
        self.batch.positions.fill_(position)
        self.batch.slot_mapping.fill_(position)
        self.batch.seq_lens.fill_(position + 1)


class _Watch(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.counts[f"torch {func.overloadpacket.__name__}"] += 1
        return func(*args, **(kwargs or {}))


class _Counted:
    """The engine's C functions, each of which counts its calls."""

    def __init__(self, functions: Any, counts: Counter[str]) -> None:
        self._functions, self._counts = functions, counts

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        if function is None:
            return None

        def call(*arguments: Any) -> Any:
            self._counts[f"C {name}"] += 1
            return function(*arguments)

        return call


def calls_of(step: Callable[[], object]) -> Counter[str]:
    """What `step` calls, by name: torch's operations, views included, and our own C functions.

    The engine does not call its C functions while a dispatch mode watches torch. During the count
    this check is switched off.
    """
    counts: Counter[str] = Counter()
    takes, functions = cpu.takes, cpu.ready

    def unseen(*tensors: Any) -> bool:
        with _disable_current_modes():
            return takes(*tensors)

    cpu.takes = unseen  # type: ignore[assignment]
    cpu.ready = lambda dtype: _Counted(functions(dtype), counts)  # type: ignore[assignment,return-value]
    try:
        with _Watch(counts):
            step()
    finally:
        cpu.takes, cpu.ready = takes, functions
    return counts


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Callable[[], object]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self.calls.append((f"torch {name}", partial(func, *args, **kwargs)))
        return out


def quietly(run: Callable[[], object], repeats: int, budget: float) -> float:
    """Median seconds. A busy machine is reported where the result is recorded, not at each call."""
    with redirect_stdout(io.StringIO()):
        return measure(run, repeats=repeats, budget=budget).median


@torch.inference_mode()
def alone(step: Callable[[], object]) -> Counter[str]:
    """Seconds of `step`'s torch operations by name, each called again and again by itself: the
    fastest call counts."""
    with _Record() as record:
        step()
    seconds: Counter[str] = Counter()
    for name, call in record.calls:
        with redirect_stdout(io.StringIO()):
            times = measure(call, repeats=100, warmup=20, budget=0.005).times
        seconds[name] += min(times)  # type: ignore[assignment]
    return seconds


# ---- rungs -----------------------------------------------------------------------------------


@contextmanager
def without_c() -> Iterator[None]:
    """As if `MINILLM_C=0` had been set before Python started."""
    before = os.environ.get(c_library.SWITCH)
    os.environ[c_library.SWITCH] = "0"
    _forget_libraries()
    try:
        yield
    finally:
        if before is None:
            del os.environ[c_library.SWITCH]
        else:
            os.environ[c_library.SWITCH] = before
        _forget_libraries()


def _forget_libraries() -> None:
    c_library.library.cache_clear()
    cpu.functions.cache_clear()


class Way(NamedTuple):
    """A rung's engine. The last two rungs share one, and differ in `all_layers`."""

    name: str
    llm: LLM
    all_layers: LayersMethod | None

    def chosen(self) -> LLM:
        """The engine, which runs its steps in this way until another way is chosen."""
        self.llm.engine.forward_pass.model.all_layers = self.all_layers
        return self.llm


def rungs(model: str, **options: Any) -> list[Way]:
    """The engine from plain torch to one call for all layers, as far as this machine goes.

    All have the dtype of the first, so all read the same bytes. The second differs from the first
    only in the order of its weights in memory, which oneDNN chooses.
    """
    options = {"device": "cpu", "max_model_len": 512} | options
    plain = LLM(model, enforce_eager=True, **options)
    options["dtype"] = plain.engine.dtype
    packed = LLM(model, enforce_eager=True, **options)
    with without_c():
        pack_weights(packed.engine.forward_pass.model)
    found = [Way(PLAIN, plain, None), Way(PACKED, packed, None)]
    if cpu.functions(plain.engine.forward_pass.dtype) is None:
        return found
    llm = LLM(model, **options)
    layers = llm.engine.forward_pass.model.all_layers
    found.append(Way(FUSED, llm, None))
    return found if layers is None else [*found, Way(WHOLE, llm, layers)]


@dataclass(frozen=True)
class Rung:
    """A way to run a step: its seconds, those of its matrix products alone, and its calls."""

    name: str
    seconds: float
    products: float
    calls: int

    @property
    def price(self) -> float:
        """Seconds that a call costs, when what is not a product is shared among the calls."""
        return max(self.seconds - self.products, 0.0) / self.calls


def in_turn(runs: Mapping[str, Callable[[], object]], rounds: int = 6) -> dict[str, float]:
    """Seconds of each run: medians, measured one after the other and again; the fastest counts."""
    best = dict.fromkeys(runs, math.inf)
    for _ in range(common.rounds(rounds)):
        for name, run in runs.items():
            best[name] = min(best[name], quietly(run, 25, 0.15))
    return best


def climb(ways: Sequence[Way], rounds: int = 6) -> list[Rung]:
    """Measure all ways in turn, again and again, so that what disturbs the machine for a while
    disturbs all alike. Each round has the medians of some steps; the fastest round counts."""
    steps = [DecodeStep.of(way.chosen()) for way in ways]
    parts = [product_pass(step.model, 1) for step in steps]
    best = [[math.inf, math.inf] for _ in ways]
    for _ in range(common.rounds(rounds)):
        for way, step, products, least in zip(ways, steps, parts, best, strict=True):
            way.chosen()
            least[0] = min(least[0], quietly(step, 15, 0.1))
            least[1] = min(least[1], quietly(products, 15, 0.1))
    totals = [calls_of(DecodeStep.of(way.chosen())).total() for way in ways]
    return [
        Rung(way.name, seconds, products, count)
        for way, (seconds, products), count in zip(ways, best, totals, strict=True)
    ]


def fits_cache(num_bytes: float) -> bool:
    """Whether so many bytes fit into the largest cache of the processor."""
    return num_bytes <= machine.last_level_cache_bytes()


def bandwidth(
    panels: Mapping[str, Sequence[Rung]],
    sizes: Mapping[str, float],
    before: Hardware,
    attempts: int = 3,
    again: Callable[..., Hardware] = ceilings.measure,
) -> float:
    """Bytes per second: the highest of the ceilings `before` the rungs, of those measured `again`,
    and of the rungs of models of `sizes` bytes that fit into no cache.

    Ceilings are measured again once, and up to `attempts` times while such a model has a rung
    faster than its reading: then the earlier ceilings were disturbed.
    """
    best = before.bandwidth
    for _ in range(common.rounds(attempts + 1) - 1):  # in a hurry none
        best = max(best, again(refresh=True).bandwidth)
        if not too_fast(panels, sizes, best):
            break
    reached = [
        sizes[model] / min(rung.seconds for rung in rungs)
        for model, rungs in panels.items()
        if not fits_cache(sizes[model])
    ]
    return max([best, *reached])


def too_fast(
    panels: Mapping[str, Sequence[Rung]], sizes: Mapping[str, float], rate: float
) -> list[str]:
    """The models that fit into no cache, and still have a rung faster than reading at `rate`."""
    return [
        model
        for model, rungs in panels.items()
        if not fits_cache(sizes[model])
        and min(rung.seconds for rung in rungs) < sizes[model] / rate
    ]


def written(llm: LLM, prompt: Sequence[int], most: int) -> list[int]:
    """The most likely continuation, token by token."""
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    (output,) = llm.generate([list(prompt)], params, use_tqdm=False)
    return output.outputs[0].token_ids


def answers(llm: LLM, stops: Mapping[int, int] = MappingProxyType({})) -> list[list[int]]:
    """The greedy tokens of six requests of different lengths. `stops` maps a request's number to
    the token at which it ends."""
    prompts = [[number + 1] * (4 + number) for number in range(6)]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=10 + 5 * number,
            ignore_eos=True,
            stop_token_ids=[stops[number]] if number in stops else [],
        )
        for number in range(6)
    ]
    return [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]
