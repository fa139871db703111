"""What launchers require of their arguments: a kernel with a wrong shape reads out of bounds.

Every check raises KernelError with what was given and what is allowed. None reads values of a
tensor, which would synchronise, except when debugging or interpreting.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from minillm_kernels import launch
from minillm_kernels.launch import KernelError, Tails

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)

device = launch.check_device


def dtype(allowed: Sequence[torch.dtype], **tensors: Tensor | None) -> None:
    """Check that every tensor has one of these dtypes."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in allowed:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise KernelError(f"{name} is {tensor.dtype}; it must be {names}.")


def same_dtype(**tensors: Tensor | None) -> torch.dtype:
    """Check that all tensors have the same floating-point dtype; returns it."""
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor is not None}
    if len(dtypes) == 1 and (only := dtypes.pop()) in FLOATS:
        return only
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    dtype(FLOATS, **given)
    (name, first), *rest = given.items()
    for other, tensor in rest:
        if tensor.dtype != first.dtype:
            raise KernelError(
                f"{name} is {first.dtype} and {other} {tensor.dtype}; they must be the same."
            )
    return first.dtype


def shape(name: str, tensor: Tensor, *shape: int | str) -> None:
    """Check the shape of a tensor; a string stands for any size."""
    sizes = tensor.shape
    fits = len(sizes) == len(shape)
    for want, size in zip(shape, sizes):  # noqa: B905  # a generator would take twice as long
        if want != size and not isinstance(want, str):
            fits = False
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise KernelError(f"{name} is {list(sizes)}; it must be [{wanted}].")


def last_contiguous(**tensors: Tensor | None) -> None:
    """Check that the last dimension is contiguous; the other strides may be anything."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise KernelError(
                f"{name} has strides {tensor.stride()}; its last dimension must be contiguous "
                f"(stride 1): call {name}.contiguous()."
            )


def contiguous(**tensors: Tensor | None) -> None:
    """Check that every tensor is contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise KernelError(
                f"{name} has shape {list(tensor.shape)} and strides {tensor.stride()}; it must be "
                f"contiguous: call {name}.contiguous()."
            )


def head_dim(name: str, head_dim: int, most: int = launch.MAX_HEAD_DIM) -> None:
    """Check that a head fits into the registers of a program and into 16-byte accesses."""
    if not 0 < head_dim <= most or head_dim % 8:
        raise KernelError(
            f"{name} has a head_dim of {head_dim}; it must be a multiple of 8 and at most {most}."
        )


def groups(num_heads: int, num_kv_heads: int, most: int | None = None) -> int:
    """The number of query heads that share a KV head, after checking that it is whole."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise KernelError(
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly; the first must "
            "be a multiple of the second."
        )
    group = num_heads // num_kv_heads
    if most is not None and group > most:
        raise KernelError(f"{group} query heads share a KV head; the maximum is {most}.")
    return group


def sequences(
    q: Tensor, cache: Tensor, query_start: Tensor, seq_lens: Tensor, block_tables: Tensor
) -> None:
    """Check where the sequences of q [N, H, D] are in a cache [blocks, Hkv, block_size, D]."""
    tensors = {"query_start": query_start, "seq_lens": seq_lens, "block_tables": block_tables}
    device(q=q, **tensors)
    dtype(INTEGERS, **tensors)
    shape("seq_lens", seq_lens, "B")
    shape("query_start", query_start, seq_lens.shape[0] + 1)
    shape("block_tables", block_tables, seq_lens.shape[0], "M")
    last_contiguous(**tensors)
    starts("query_start", query_start, len(q))
    entries(block_tables, seq_lens, cache.shape[0], cache.shape[2])


def attention(
    scale: float, window: int | None, soft_cap: float | None, max_query_len: int | None
) -> None:
    """Check the numbers of a call of attention."""
    if not 0 < scale < math.inf:
        raise KernelError(f"scale is {scale}; it must be positive and finite.")
    if window is not None and window < 1:
        raise KernelError(f"window is {window}; it must be at least 1, or None.")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise KernelError(f"soft_cap is {soft_cap}; it must be positive and finite, or None.")
    if max_query_len is not None and max_query_len < 1:
        raise KernelError(f"max_query_len is {max_query_len}; it must be at least 1, or None.")


def output(out: Tensor | None, sizes: Sequence[int], like: Tensor, name: str = "out") -> Tensor:
    """`out` after the same checks as an input, or a new tensor of these sizes."""
    if out is None:
        return torch.empty(tuple(sizes), dtype=like.dtype, device=like.device)
    shape(name, out, *sizes)
    last_contiguous(**{name: out})
    if out.dtype != like.dtype or out.device != like.device:
        raise KernelError(
            f"{name} is {out.dtype} on {out.device}; it must be {like.dtype} on {like.device}."
        )
    return out


def starts(name: str, starts: Tensor, num_rows: int) -> None:
    """When debugging or interpreting, check that bounds begin with 0, ascend, and end in range."""
    if not (launch.DEBUG or launch.INTERPRETED):
        return
    bounds = starts.tolist()
    ascending = all(low <= high for low, high in pairwise(bounds))
    if bounds[:1] != [0] or not ascending or bounds[-1] > num_rows:
        raise KernelError(
            f"{name} is {bounds}; it must begin with 0, not decrease, and end with at most "
            f"{num_rows}, the number of rows."
        )


def entries(block_tables: Tensor, seq_lens: Tensor, num_blocks: int, block_size: int) -> None:
    """Check the width of block tables; when debugging or interpreting, also that blocks exist.

    Only the entries within a sequence's length are checked; later entries are stale.
    """
    if not (launch.DEBUG or launch.INTERPRETED):
        return
    tables, lengths = block_tables.tolist(), seq_lens.tolist()
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        if length < 0:
            raise KernelError(f"seq_lens[{row}] is {length}; it must be 0 or more.")
        needed = -(-length // block_size)
        if needed > len(table):
            raise KernelError(
                f"seq_lens[{row}] is {length}, which needs {needed} blocks of {block_size}; its "
                f"block table has {len(table)}."
            )
        for place, block in enumerate(table[:needed]):
            if not 0 <= block < num_blocks:
                raise KernelError(
                    f"block_tables[{row}, {place}] is {block}; the cache has blocks 0 to "
                    f"{num_blocks - 1}."
                )


def tail_arguments(
    tails: Tails | None, count: int
) -> tuple[Tensor | None, Tensor | None, int | None]:
    """What kernels take for the tails of `count` sequences: nothing is read without them."""
    if tails is None:
        return None, None, None
    starts, order = tails
    dtype((torch.int32,), tail_starts=starts, tail_order=order)
    shape("tail_starts", starts, count)
    shape("tail_order", order, count, "T")
    contiguous(tail_starts=starts, tail_order=order)
    return starts, order, order.shape[1]
