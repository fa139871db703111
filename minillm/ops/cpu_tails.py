"""The order of keys of token trees as C reads it (`c/tails.h`)."""

from ctypes import Structure
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.ops.batch import Tails
from minillm.ops.cpu_checks import check, check_integers
from minillm.ops.cpu_structures import structure_of


@dataclass(frozen=True)
class TailsInC:
    """`batch_tails` of tails.h."""

    starts: Tensor
    order: Tensor
    width: int


def tails_in_c(tails: Tails | None, sequences: int) -> Structure | None:
    """The order of keys of token trees (`tails.h`); the caller keeps its tensors alive."""
    if tails is None:
        return None
    for name, tail in zip(Tails._fields, tails, strict=True):
        check_integers(name, tail, torch.int32)
        check(len(tail) == sequences, name, tail, f"[{sequences}, ..]")
    return structure_of(TailsInC)(*(tail.data_ptr() for tail in tails), tails.order.shape[1])
