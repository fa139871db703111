"""Asynchronous copies between host and device."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


def put(target: Tensor, values: NDArray) -> None:
    """Overwrite a tensor in place, asynchronously on a GPU."""
    if target.device.type == "cpu":
        target.copy_(torch.from_numpy(values))
    else:
        target.copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)


def upload(device: torch.device, *arrays: NDArray) -> list[Tensor]:
    """Copy arrays to the device as tensors, all in one asynchronous copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    together, starts = pack(arrays)
    there = torch.from_numpy(together).pin_memory().to(device, non_blocking=True)
    return unpack(there, arrays, starts)


def indices(device: torch.device, values: ArrayLike) -> Tensor:
    """Integers on the device, int64, without waiting for what runs there, as `torch.tensor` would:
    it copies from pageable memory."""
    return upload(device, np.array(values, dtype=np.int64))[0]


def read_later(*tensors: Tensor) -> Callable[[], list[Tensor]]:
    """Start copying contiguous tensors to the host. The returned function waits for the copies.
    Tensors of one memory, such as `together` makes, are copied at once, with what is between."""
    first = tensors[0]
    if first.device.type == "cpu":
        copies = [tensor.clone() for tensor in tensors]
        return lambda: copies
    memory = first.untyped_storage()._cdata
    alone = any(tensor.untyped_storage()._cdata != memory for tensor in tensors)
    pinned = [_start_copy(tensor) for tensor in tensors] if alone else _copy_together(tensors)
    arrived = torch.Event(first.device)
    arrived.record()

    def read() -> list[Tensor]:
        arrived.synchronize()
        return pinned

    return read


def _copy_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The copies of tensors of one memory, by one copy of the part of it that holds them."""
    starts = [tensor.storage_offset() * tensor.itemsize for tensor in tensors]
    ends = [start + tensor.nbytes for start, tensor in zip(starts, tensors, strict=True)]
    begin, size = min(starts) // 8 * 8, tensors[0].itemsize
    part = tensors[0].as_strided((-(-(max(ends) - begin) // size),), (1,), begin // size)
    here = _start_copy(part).view(torch.uint8)
    return [
        here[start - begin : end - begin].view(tensor.dtype).view(tensor.shape)
        for start, end, tensor in zip(starts, ends, tensors, strict=True)
    ]


def _start_copy(there: Tensor) -> Tensor:
    """A tensor in pinned memory, to which another one is being copied."""
    here = torch.empty_like(there, device="cpu", pin_memory=True)
    return here.copy_(there, non_blocking=True)


def together(count: int, device: torch.device, *dtypes: torch.dtype) -> list[Tensor]:
    """Uninitialised tensors [count] in one memory; the dtypes must not become larger."""
    sizes = [count * dtype.itemsize for dtype in dtypes]
    memory = torch.empty(-(-sum(sizes) // 8) * 8, dtype=torch.uint8, device=device)
    parts = memory[: sum(sizes)].split(sizes)
    return [part.view(dtype) for part, dtype in zip(parts, dtypes, strict=True)]


def pack(arrays: Sequence[NDArray]) -> tuple[NDArray[np.uint8], list[int]]:
    """Concatenate the bytes of all arrays. Returns them and each start, a multiple of 8 because
    tensors must be aligned."""
    ends = np.cumsum([-(-array.nbytes // 8) * 8 for array in arrays]).tolist()
    # Never empty: torch gives an empty tensor strides that have no view as another type.
    together, starts = np.zeros(max(ends[-1], 8), dtype=np.uint8), [0, *ends[:-1]]
    for start, array in zip(starts, arrays, strict=True):
        together[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    return together, starts


def unpack(there: Tensor, arrays: Sequence[NDArray], starts: Sequence[int]) -> list[Tensor]:
    """Views of packed bytes as tensors with the types and shapes of `arrays`."""
    return [
        there[start : start + array.nbytes]
        .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        .view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]
