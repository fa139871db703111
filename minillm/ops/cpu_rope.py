"""Rotary angles in C (`cos_sin` of `c/rows.c`), on one thread.

torch computes cosines with several threads, even for one position. These spin for a while
afterwards and take processor time from the threads of the next C function.
"""

from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from minillm.ops.c_library import Library, library
from minillm.ops.cpu_checks import check_integers, check_vector


@cache
def _function() -> Callable[..., None]:
    built = library("F32")
    if not isinstance(built, Library):
        raise RuntimeError("there are no C functions for float32; check `cpu.takes` first.")
    function = built.cos_sin
    addresses = c_void_p, c_void_p
    function.restype, function.argtypes = None, [*addresses, c_float, *addresses, c_int64, c_int64]
    return function


def cos_sin(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """int64 [N], float32 [D / 2] -> cos and sin times `factor`, float32 [N, D / 2] each."""
    positions, frequencies = positions.long().contiguous(), frequencies.contiguous()
    count, half = len(positions), len(frequencies)
    check_integers("positions", positions, torch.int64)
    check_vector("frequencies", frequencies, half, torch.float32)
    cos, sin = torch.empty(count, half), torch.empty(count, half)
    given = positions.data_ptr(), frequencies.data_ptr()
    _function()(*given, factor, cos.data_ptr(), sin.data_ptr(), count, half)
    return cos, sin
