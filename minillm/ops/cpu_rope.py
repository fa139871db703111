"""Rotary angles in C (`cos_sin` of `c/rows.c`), on one thread.

torch computes cosines with several threads, even for one position. These spin for a while
afterwards and take processor time from the threads of the next C function.
"""

import torch
from torch import Tensor

from minillm.ops import cpu
from minillm.ops.cpu_checks import check_integers, check_vector


def cos_sin(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """int64 [N], float32 [D / 2] -> cos and sin times `factor`, float32 [N, D / 2] each."""
    positions, frequencies = positions.long().contiguous(), frequencies.contiguous()
    count, half = len(positions), len(frequencies)
    check_integers("positions", positions, torch.int64)
    check_vector("frequencies", frequencies, half, torch.float32)
    cos, sin = torch.empty(count, half), torch.empty(count, half)
    given = positions.data_ptr(), frequencies.data_ptr()
    cpu.ready(torch.float32).cos_sin(*given, factor, cos.data_ptr(), sin.data_ptr(), count, half)
    return cos, sin
