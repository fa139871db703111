"""What this GPU can do at most: every share in a table is one of these, measured in the same run.

* read: summing a large buffer, which decode's reading of weights and cache cannot beat;
* copy: reading and writing large buffers, the faster of the driver's copy and a plain kernel;
* matmul: torch's bf16 product of two 8192 x 8192 matrices of random numbers (zeros run faster).
"""

import torch
from torch import Tensor

from minillm_kernels.bench.case import Measurement

FAMILY = "ceilings"
BUFFER = 2**30  # bytes
MATRIX = 8192  # rows and columns


def ceilings(tiny: bool = False) -> list[Measurement]:
    """All; each timing of the copy moves 4 GB or more where the memory allows it."""
    return [_read(tiny), _copy(tiny), _matmul(tiny)]


def _buffers(tiny: bool, count: int) -> list[Tensor]:
    size = 256 if tiny else min(BUFFER, torch.cuda.mem_get_info()[0] // 8)
    device = "cpu" if tiny else "cuda"
    return [
        torch.empty(size // 4, dtype=torch.int32, device=device).random_() for _ in range(count)
    ]


def _read(tiny: bool) -> Measurement:
    buffers = [buffer.to(torch.float32) for buffer in _buffers(tiny, 2)]
    return Measurement(
        FAMILY,
        "read",
        lambda index: buffers[index].sum(),
        buffers[0].nbytes,
        bound="read",
        peers={"the largest": lambda index: buffers[index].amax()},
        num_sets=2,
    )


def _copy(tiny: bool) -> Measurement:
    buffers = _buffers(tiny, 4)
    pairs = ((buffers[0], buffers[1]), (buffers[2], buffers[3]))  # from, to

    def kernel(index: int) -> Tensor:
        source, target = pairs[index]
        return torch.bitwise_not(source, out=target)

    return Measurement(
        FAMILY,
        "device copy",
        lambda index: pairs[index][1].copy_(pairs[index][0]),
        2 * buffers[0].nbytes,
        peers={"by a kernel": kernel},
        num_sets=2,
    )


def _matmul(tiny: bool) -> Measurement:
    n = 16 if tiny else MATRIX
    device = "cpu" if tiny else "cuda"
    sets = [
        [torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2)] for _ in range(2)
    ]
    return Measurement(
        FAMILY,
        f"torch bf16 matmul {n}^3",
        lambda index: sets[index][0] @ sets[index][1],
        num_bytes=3 * n * n * 2,
        num_flops=2 * n**3,
        bound="matmul",
        num_sets=2,
    )
