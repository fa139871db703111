"""Shared by all kernel files: the import of Triton, argument checks, and the target architecture.

Kernel files import `tl` and `triton` from here, so that a missing Triton gives one clear error. A
launcher checks its arguments first, because a kernel with a wrong shape reads out of bounds.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor

__all__ = [
    "DEBUG",
    "INTERPRETED",
    "KernelError",
    "TensorDescriptor",
    "TritonMissingError",
    "arch",
    "cdiv",
    "check_block_tables",
    "check_contiguous",
    "check_device",
    "check_dtype",
    "check_groups",
    "check_head_dim",
    "check_last_contiguous",
    "check_same_dtype",
    "check_shape",
    "check_starts",
    "compiled",
    "num_multiprocessors",
    "output",
    "padded",
    "tl",
    "triton",
]


class KernelError(ValueError):
    """Unsupported arguments of a kernel; the message says what was given and what is allowed."""


class TritonMissingError(ImportError):
    """Triton is not installed."""


try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:
    raise TritonMissingError(
        "minillm's kernels need Triton, which is not installed (on Linux: pip install triton); "
        "minillm_kernels.reference has the same operations in plain torch."
    ) from error

# If set before Triton is imported, kernels run in Python on CPU tensors (for tests and teaching).
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# If set, every launch also checks values, such as those of block tables, which synchronises.
DEBUG = os.environ.get("MINILLM_DEBUG_KERNELS") == "1"
OLDEST = 80  # Ampere: bf16 tensor cores and asynchronous copies
MAX_HEAD_DIM = 256
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
# Maximum shared memory of a program in bytes, by compute capability (CUDA C++ Programming Guide,
# table of technical specifications). The launch checks it; the compiler does not.
SHARED_MEMORY: Mapping[int, int] = MappingProxyType(
    {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
)


def arch() -> int:
    """Compute capability that the next launch is compiled for (80, 90, 100); 0 if interpreted."""
    if INTERPRETED:
        return 0
    driver = triton.runtime.driver.active
    return _arch_of(type(driver).__name__, driver.get_current_device())


@cache
def _arch_of(driver: str, device: int) -> int:
    # Asking takes microseconds, and each launch needs it. A device of `offline` is its arch.
    return int(triton.runtime.driver.active.get_current_target().arch)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of the GPU; that of an H200 without a GPU (compiling only)."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def compiles_only() -> bool:
    """Whether launches are compiled and not run (`minillm_kernels.offline`), on any tensor."""
    try:
        return getattr(triton.runtime.driver.active, "compiles_only", False)
    except RuntimeError:  # no driver
        return False


@contextmanager
def compiled() -> Iterator[list[str]]:
    """For the block, collect the names of the kernels that Triton compiles or loads."""
    names: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **others: names.append(fn.name)
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


def check_device(**tensors: Tensor | None) -> torch.device:
    """Check that all tensors are on the current CUDA device and that it is supported (or on the CPU
    if interpreted); returns the device."""
    name, device = next((name, each.device) for name, each in tensors.items() if each is not None)
    for other, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise KernelError(
                f"{name} is on {device} and {other} on {tensor.device}; move one of them."
            )
    if INTERPRETED:
        if device.type != "cpu":
            raise KernelError(f"{name} is on {device}; interpreted kernels need CPU tensors.")
    elif device.type != "cuda" and not compiles_only():
        raise KernelError(
            f"{name} is on {device}; a compiled kernel needs CUDA tensors. Use "
            "minillm_kernels.reference there, or set TRITON_INTERPRET=1 before the import."
        )
    elif device.type == "cuda" and torch.version.hip is None:
        _check_capability(name, device)
        if device.index != torch.cuda.current_device():  # Triton launches on the current device
            raise KernelError(
                f"{name} is on {device} and the current device is cuda:"
                f"{torch.cuda.current_device()}; launch inside torch.cuda.device({device.index})."
            )
    return device


@cache
def _check_capability(name: str, device: torch.device) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < OLDEST:
        raise KernelError(
            f"{name} is on {device} with compute capability {major}.{minor}; these kernels "
            "need 8.0 (Ampere) or newer. Use minillm_kernels.reference there."
        )


def check_dtype(allowed: Sequence[torch.dtype], **tensors: Tensor | None) -> None:
    """Check that every tensor has one of these dtypes."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in allowed:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise KernelError(f"{name} is {tensor.dtype}; it must be {names}.")


def check_same_dtype(**tensors: Tensor | None) -> torch.dtype:
    """Check that all tensors have the same floating-point dtype; returns it."""
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor is not None}
    if len(dtypes) == 1 and (dtype := dtypes.pop()) in FLOATS:
        return dtype
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    check_dtype(FLOATS, **given)
    (name, first), *rest = given.items()
    for other, tensor in rest:
        if tensor.dtype != first.dtype:
            raise KernelError(
                f"{name} is {first.dtype} and {other} {tensor.dtype}; they must be the same."
            )
    return first.dtype


def check_shape(name: str, tensor: Tensor, *shape: int | str) -> None:
    """Check the shape of a tensor; a string stands for any size."""
    sizes = tensor.shape
    fits = len(sizes) == len(shape)
    for want, size in zip(shape, sizes):  # noqa: B905  # a generator would take twice as long
        if want != size and not isinstance(want, str):
            fits = False
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise KernelError(f"{name} is {list(sizes)}; it must be [{wanted}].")


def check_last_contiguous(**tensors: Tensor | None) -> None:
    """Check that the last dimension is contiguous; the other strides may be anything."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise KernelError(
                f"{name} has strides {tensor.stride()}; its last dimension must be contiguous "
                f"(stride 1): call {name}.contiguous()."
            )


def check_contiguous(**tensors: Tensor | None) -> None:
    """Check that every tensor is contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise KernelError(
                f"{name} has shape {list(tensor.shape)} and strides {tensor.stride()}; it must be "
                f"contiguous: call {name}.contiguous()."
            )


def check_head_dim(name: str, head_dim: int, most: int = MAX_HEAD_DIM) -> None:
    """Check that a head fits into the registers of a program and into 16-byte accesses."""
    if not 0 < head_dim <= most or head_dim % 8:
        raise KernelError(
            f"{name} has a head_dim of {head_dim}; it must be a multiple of 8 and at most {most}."
        )


def check_groups(num_heads: int, num_kv_heads: int) -> int:
    """The number of query heads that share a KV head, after checking that it is whole."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise KernelError(
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly; the first must "
            "be a multiple of the second."
        )
    return num_heads // num_kv_heads


def output(out: Tensor | None, shape: Sequence[int], like: Tensor, name: str = "out") -> Tensor:
    """`out` after the same checks as an input, or a new tensor of this shape."""
    if out is None:
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    check_shape(name, out, *shape)
    check_last_contiguous(**{name: out})
    if out.dtype != like.dtype or out.device != like.device:
        raise KernelError(
            f"{name} is {out.dtype} on {out.device}; it must be {like.dtype} on {like.device}."
        )
    return out


def cdiv(size: int, block: int) -> int:
    """The quotient rounded up, as `triton.cdiv`, which takes microseconds on the host."""
    return -(-size // block)


def padded(size: int, least: int = 16) -> int:
    """The next power of two from `size` on, the block size of a kernel."""
    return max(least, 1 << (size - 1).bit_length())


def check_starts(name: str, starts: Tensor, num_rows: int) -> None:
    """When debugging or interpreting, check that bounds begin with 0, ascend, and end in range."""
    if not (DEBUG or INTERPRETED):
        return
    bounds = starts.tolist()
    ascending = all(low <= high for low, high in pairwise(bounds))
    if bounds[:1] != [0] or not ascending or bounds[-1] > num_rows:
        raise KernelError(
            f"{name} is {bounds}; it must begin with 0, not decrease, and end with at most "
            f"{num_rows}, the number of rows."
        )


def check_block_tables(
    block_tables: Tensor, seq_lens: Tensor, num_blocks: int, block_size: int
) -> None:
    """Check the width of block tables; when debugging or interpreting, also that blocks exist.

    Only the entries within a sequence's length are checked; later entries are stale.
    """
    if not (DEBUG or INTERPRETED):
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


Tails = tuple[Tensor, Tensor]
"""`starts` [B] and `order` [B, T], int32, of sequences that are paths of token trees: position
`starts[b] + i` of a sequence is at place `starts[b] + order[b, i]` of its blocks, and earlier
positions are in order. Only sequences of one query may have such positions."""


def tail_arguments(
    tails: Tails | None, count: int
) -> tuple[Tensor | None, Tensor | None, int | None]:
    """What kernels take for the tails of `count` sequences: nothing is read without them."""
    if tails is None:
        return None, None, None
    starts, order = tails
    check_dtype((torch.int32,), tail_starts=starts, tail_order=order)
    check_shape("tail_starts", starts, count)
    check_shape("tail_order", order, count, "T")
    check_contiguous(tail_starts=starts, tail_order=order)
    return starts, order, order.shape[1]


def arrival_counters(device: torch.device, count: int) -> Tensor:
    """Programs that have arrived at each tile, int32 [count]: 0 before and after every launch.
    Launches of a stream share them, and so do the graphs that it captured: these must not overlap.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return _counters(device, stream, count)


@cache
def _counters(device: torch.device, stream: object, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
