"""Copies between host and device that nothing waits for."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def put(target: Tensor, values: NDArray) -> None:
    """Overwrite a tensor that must stay where it is; nobody waits for it."""
    if target.device.type == "cpu":
        target.copy_(torch.from_numpy(values))
    else:
        target.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)


def upload(device: torch.device, *arrays: NDArray) -> list[Tensor]:
    """Each array as a tensor on the device; all together in one copy that nobody waits for."""
    if device.type == "cpu":
        return [torch.from_numpy(each) for each in arrays]
    together, starts = pack(arrays)
    there = torch.from_numpy(together).pin_memory().to(device, non_blocking=True)
    return unpack(there, arrays, starts)


def read_later(*tensors: Tensor) -> Callable[[], list[Tensor]]:
    """Copy tensors towards the host now; the answer waits for them."""
    if tensors[0].device.type == "cpu":
        copies = [each.clone() for each in tensors]
        return lambda: copies
    pinned = [torch.empty_like(each, device="cpu", pin_memory=True) for each in tensors]
    for here, there in zip(pinned, tensors, strict=True):
        here.copy_(there, non_blocking=True)
    arrived = torch.Event(tensors[0].device)
    arrived.record()

    def read() -> list[Tensor]:
        arrived.synchronize()
        return pinned

    return read


def pack(arrays: Sequence[NDArray]) -> tuple[NDArray[np.uint8], list[int]]:
    """The bytes of all arrays in one, and where each starts: at a multiple of 8, because a tensor's
    numbers must be aligned."""
    ends = np.cumsum([-(-each.nbytes // 8) * 8 for each in arrays]).tolist()
    together, starts = np.zeros(ends[-1], dtype=np.uint8), [0, *ends[:-1]]
    for start, each in zip(starts, arrays, strict=True):
        together[start : start + each.nbytes] = np.ascontiguousarray(each).view(np.uint8).ravel()
    return together, starts


def unpack(there: Tensor, arrays: Sequence[NDArray], starts: Sequence[int]) -> list[Tensor]:
    """Tensors like the arrays that were packed, wherever the bytes are now."""
    return [
        there[start : start + each.nbytes]
        .view(torch.from_numpy(np.empty(0, each.dtype)).dtype)
        .view(each.shape)
        for start, each in zip(starts, arrays, strict=True)
    ]
