"""What this GPU can do at most: every share in the table is one of these two, measured as well.

* copy: reading and writing large buffers, the faster of the driver's copy and a plain kernel;
* matmul: torch's bf16 product of two 8192 x 8192 matrices of random numbers (zeros run faster).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm_kernels.bench.case import Measurement
from minillm_kernels.bench.results import Result

FAMILY = "ceilings"
COPY, MATMUL = "copy", "matmul"
BUFFER = 2**30  # bytes
MATRIX = 8192  # rows and columns


@dataclass(frozen=True)
class Ceilings:
    """Rates that a perfect kernel would reach; None where the measurement failed."""

    copy: float | None  # bytes per second, read + written
    matmul: float | None  # operations per second

    @classmethod
    def of(cls, results: Sequence[Result]) -> "Ceilings":
        """From the results of `ceilings`."""
        best: dict[str, float] = {}
        for result in results:
            timings = [result.timing, *(peer.timing for peer in result.peers)]
            times = [timing.seconds for timing in timings if timing]
            work = result.num_flops if result.bound == MATMUL else result.num_bytes
            if times:
                best[result.bound] = work / min(times)
        return cls(best.get(COPY), best.get(MATMUL))


def ceilings(tiny: bool = False) -> list[Measurement]:
    """Both; each timing of the copy moves 4 GB or more where the memory allows it."""
    return [_copy(tiny), _matmul(tiny)]


def _copy(tiny: bool) -> Measurement:
    size = 256 if tiny else min(BUFFER, torch.cuda.mem_get_info()[0] // 8)
    device = "cpu" if tiny else "cuda"
    buffers = [torch.empty(size // 4, dtype=torch.int32, device=device).random_() for _ in range(4)]
    pairs = ((buffers[0], buffers[1]), (buffers[2], buffers[3]))  # from, to

    def copy(index: int) -> Tensor:
        source, target = pairs[index]
        return target.copy_(source)

    def kernel(index: int) -> Tensor:
        source, target = pairs[index]
        return torch.bitwise_not(source, out=target)

    moved = 2 * buffers[0].numel() * 4
    return Measurement(
        FAMILY, "device copy", copy, moved, peers={"by a kernel": kernel}, num_sets=2
    )


def _matmul(tiny: bool) -> Measurement:
    n = 16 if tiny else MATRIX
    device = "cpu" if tiny else "cuda"
    sets = [
        [torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2)] for _ in range(2)
    ]

    def matmul(index: int) -> Tensor:
        return sets[index][0] @ sets[index][1]

    return Measurement(
        FAMILY,
        f"torch bf16 matmul {n}^3",
        matmul,
        num_bytes=3 * n * n * 2,
        num_flops=2 * n**3,
        bound="matmul",
        num_sets=2,
    )
