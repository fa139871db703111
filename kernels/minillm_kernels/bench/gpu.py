"""The GPU as a stopwatch: what it is, and how long a call takes on it."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from minillm_kernels.bench.case import Call

TIMING = 2e-3  # seconds that one timing should take, so that an event's resolution is nothing
MAX_CALLS = 512  # in one timing


class NoGpuError(RuntimeError):
    """There is no GPU that could run the benchmarks: one sentence that says why."""


class NotANumberError(ValueError):
    """A result has NaN in it, so its inputs were not what a model would give."""


def require_gpu() -> None:
    """NoGpuError unless compiled kernels can run on the current CUDA device; needs Triton."""
    from minillm_kernels.launch import INTERPRETED, OLDEST

    if INTERPRETED:
        raise NoGpuError(
            "TRITON_INTERPRET=1 is set, and interpreted kernels have no speed: unset it."
        )
    if torch.version.hip is not None or not torch.cuda.is_available():
        raise NoGpuError(
            "The benchmark needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer, and "
            "torch sees none here."
        )
    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < OLDEST:
        raise NoGpuError(
            f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}; the kernels "
            "need 8.0 (Ampere) or newer."
        )


class Gpu:
    """The current CUDA device."""

    def __init__(self) -> None:
        require_gpu()
        self.properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.cache_bytes = int(self.properties.L2_cache_size)

    def facts(self) -> dict[str, Any]:
        """What a reader of the numbers wants to know of it and of the software."""
        from minillm_kernels.launch import triton

        properties = self.properties
        return {
            "name": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_cache_bytes": self.cache_bytes,
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "triton": triton.__version__,
        }

    def ready(self, call: Call, num_sets: int) -> "Timed":
        """Warm up on every input set; a graph of calls over all in turn, or plain launches if it
        cannot be captured. Raises what the call raises."""
        for index in range(num_sets):  # compiles, plans, loads modules
            result = call(index)
            if index == 0:
                refuse_nan(result)
        del result
        torch.cuda.synchronize()
        try:
            return _long_enough(call, num_sets, captured=True)
        except Exception:
            for _ in range(2):  # a failed capture leaves an error, which the next call would report
                with suppress(Exception):
                    torch.cuda.synchronize()
                    break
        return _long_enough(call, num_sets, captured=False)

    def free(self) -> None:
        """So that the next measurement has the whole memory."""
        gc.collect()
        torch.cuda.empty_cache()


def calls_per_timing(seconds: float, num_sets: int) -> int:
    """Enough calls to fill `TIMING`, every input set equally often."""
    rounds = math.ceil(TIMING / max(seconds, 1e-9) / num_sets)
    return num_sets * max(1, min(rounds, MAX_CALLS // num_sets))


def refuse_nan(result: object) -> None:
    """Data that are all NaN cost nothing to multiply; NotANumberError if any result is one."""
    for tensor in _tensors(result):
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise NotANumberError("its result has NaN in it; it would not be a fair measurement")


def _tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for part in result:
            yield from _tensors(part)


class Timed:
    """Events around one step of `calls` calls, with another step before it that keeps the GPU busy
    meanwhile: otherwise the first event passes at once, and the time until the host has launched
    counts. If `captured`, a step is the replay of a CUDA graph; raises what the capture raises."""

    def __init__(self, call: Call, num_sets: int, calls: int, captured: bool):
        self.calls, self.how = calls, "graph" if captured else "launches"
        self.start, self.stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Results of the last calls are kept, so that outputs rotate through memory as inputs do.
        self.kept: list[object] = [None] * num_sets
        self.graph: torch.cuda.CUDAGraph | None = None

        def rotate() -> None:
            for index in range(calls):
                self.kept[index % num_sets] = call(index % num_sets)

        self.step: Callable[[], object] = rotate
        if captured:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                rotate()
            self.step = self.graph.replay

    def seconds(self) -> float:
        """Time it once; seconds of one call."""
        self.step()
        self.start.record()
        self.step()
        self.stop.record()
        self.stop.synchronize()
        return self.start.elapsed_time(self.stop) / 1e3 / self.calls

    def close(self) -> None:
        """Give its memory back."""
        self.step = list  # nothing
        self.kept.clear()
        if self.graph is not None:
            self.graph.reset()


def _long_enough(call: Call, num_sets: int, captured: bool) -> Timed:
    """As many calls as `TIMING` asks, by the time of a few."""
    few = Timed(call, num_sets, num_sets, captured)
    calls = calls_per_timing(few.seconds(), num_sets)
    if calls == num_sets:
        return few
    few.close()
    return Timed(call, num_sets, calls, captured)
