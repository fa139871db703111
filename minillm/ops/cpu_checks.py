"""Checks of tensors before C reads them. C checks the values of indices itself."""

import torch
from torch import Tensor


def check_rope(rope: tuple[Tensor, Tensor], count: int, head_dim: int) -> None:
    """Raise ValueError if cos or sin have the wrong dtype or shape for C."""
    for name, angle in zip(("cos", "sin"), rope, strict=True):
        check(angle.dtype == torch.float32, name, angle, "float32")
        check(angle.shape == (count, head_dim // 2), name, angle, f"[{count}, {head_dim // 2}]")


def check_tables(query_start: Tensor, seq_lens: Tensor, block_tables: Tensor) -> None:
    """Raise ValueError if arrays of a batch have the wrong layout for C, which checks values."""
    check_integers("query_start", query_start, torch.int32)
    check_integers("seq_lens", seq_lens, torch.int32)
    rows = block_tables.dtype == torch.int64 and block_tables.stride(1) in (0, 1)
    check(rows, "block_tables", block_tables, "int64 rows")
    sequences = len(block_tables)
    check(len(query_start) == sequences + 1, "query_start", query_start, f"[{sequences + 1}]")
    check(len(seq_lens) == sequences, "seq_lens", seq_lens, f"[{sequences}]")


def check_batch(
    slot_mapping: Tensor, query_start: Tensor, seq_lens: Tensor, block_tables: Tensor
) -> None:
    """The same for all arrays of a batch."""
    check_integers("slot_mapping", slot_mapping, torch.int64)
    check_tables(query_start, seq_lens, block_tables)


def check_vector(name: str, tensor: Tensor, size: int, dtype: torch.dtype) -> None:
    """Raise ValueError unless a tensor is a contiguous vector of this size and dtype."""
    right = tensor.shape == (size,) and tensor.dtype == dtype and tensor.is_contiguous()
    check(right, name, tensor, f"contiguous [{size}], {dtype}")


def check_integers(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless a tensor of integers is contiguous and on the CPU."""
    right = tensor.dtype == dtype and tensor.is_contiguous() and tensor.device.type == "cpu"
    check(right, name, tensor, f"contiguous {dtype}")


def check(right: bool, name: str, tensor: Tensor, wanted: str) -> None:
    """Raise ValueError, which describes the tensor and what it must be, unless `right`."""
    if not right:
        given = f"{list(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}"
        raise ValueError(f"{name} is {given}; it must be {wanted}.")
