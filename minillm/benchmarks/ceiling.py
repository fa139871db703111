"""The ceilings of this machine in this minute: what the shares of a comparison are shares of.

The read bandwidth is the largest that any way of reading reaches here: plain sums, or the
product of one row with a packed weight as oneDNN does it or as our own C functions do.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from minillm import hardware


@dataclass(frozen=True)
class Ceiling:
    """Bytes/s and operations/s, by which way they were reached, and what others used meanwhile."""

    bandwidth: float
    way: str
    packed_bandwidth: float  # of oneDNN's packed bf16 product at one row; 0 where there is none
    flops: float
    flops_fp32: float

    def rate(self, dtype: str) -> float:
        """Operations/s of products in `dtype`."""
        return self.flops_fp32 if dtype == "float32" else self.flops

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def measure_ceiling(device: str, threads: int, refresh: bool = True) -> Ceiling:
    """About three seconds of measuring, with as many threads as the engines have."""
    import torch

    torch.set_num_threads(threads)
    known = hardware.measure(refresh=refresh, device=device)
    ways = {"the ceilings of minillm.hardware": known.bandwidth}
    packed = 0.0
    if device == "cpu":
        more = {name: rate(run, size) for name, (run, size) in ways_to_read().items()}
        packed, ways = more.get(PACKED, 0.0), ways | more
    way = max(ways, key=lambda name: ways[name])
    return Ceiling(ways[way], way, packed, known.peak_flops, known.peak_flops_fp32)


def best_of(first: Ceiling, second: Ceiling) -> Ceiling:
    """The higher of each: what slows a reading down is never the machine's limit."""
    higher = max(first, second, key=lambda one: one.bandwidth)
    return replace(
        higher,
        packed_bandwidth=max(first.packed_bandwidth, second.packed_bandwidth),
        flops=max(first.flops, second.flops),
        flops_fp32=max(first.flops_fp32, second.flops_fp32),
    )


PACKED = "oneDNN's packed product of one row"
SECONDS = 0.25


def rate(run: Callable[[], object], num_bytes: int) -> float:
    """Bytes/s of the fastest of the runs that fit into a quarter of a second."""
    return num_bytes / hardware._best(run, SECONDS)


def ways_to_read() -> dict[str, tuple[Callable[[], object], int]]:
    """Ways to read a buffer that no cache holds, beyond those of `hardware.measure`, each with
    its bytes."""
    import torch

    shape = (32_768, 4096)  # 256 MiB
    weight = torch.ones(shape, dtype=torch.bfloat16)
    words = weight.view(torch.int64)
    ways: dict[str, tuple[Callable[[], object], int]] = {"largest word": (words.max, words.nbytes)}
    with torch.inference_mode():
        row = torch.ones(1, shape[1], dtype=torch.bfloat16)
        for run in hardware._packed_product(row, weight):
            ways[PACKED] = (run, weight.nbytes)
    return ways
