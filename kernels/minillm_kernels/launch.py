"""Shared by all kernel files: the import of Triton, the target architecture, and counters.

Kernel files import `tl` and `triton` from here, so that a missing Triton gives one clear error.
`require.py` checks the arguments of launchers.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

__all__ = ["TensorDescriptor", "tl", "triton"]  # for kernel files, beside what is defined here


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


def cdiv(size: int, block: int) -> int:
    """The quotient rounded up, as `triton.cdiv`, which takes microseconds on the host."""
    return -(-size // block)


def padded(size: int, least: int = 16) -> int:
    """The next power of two from `size` on, the block size of a kernel."""
    return max(least, 1 << (size - 1).bit_length())


Tails = tuple[Tensor, Tensor]
"""`starts` [B] and `order` [B, T], int32, of sequences that are paths of token trees: position
`starts[b] + i` of a sequence is at place `starts[b] + order[b, i]` of its blocks, and earlier
positions are in order. Only sequences of one query may have such positions."""


def arrival_counters(device: torch.device, count: int) -> Tensor:
    """Programs that have arrived at each tile, int32 [count]: 0 before and after every launch.
    Launches of a stream share them, and so do the graphs that it captured: these must not overlap.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return _counters(device, stream, count)


@cache
def _counters(device: torch.device, stream: object, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)
