"""Compile kernels without a GPU, and inspect the machine code.

Triton's compiler and the assembler in its wheel need no GPU. `compile_for` calls real launchers
with CPU tensors as stand-ins: every `kernel[grid](...)` is compiled for the architecture and not
run. `inspect` then reads registers, spills, shared memory and instructions from the machine code
(SASS).
"""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from minillm_kernels.launch import INTERPRETED, SHARED_MEMORY, KernelError, triton

ARCHITECTURES = (80, 90, 100)
# Counted instructions: tensor cores of Ampere, Hopper and Blackwell; asynchronous and bulk copies;
# local memory (spilled registers).
MATRIX = ("HMMA", "HGMMA", "UTCHMMA", "IMMA", "IGMMA", "UTCIMMA")
COPIES = ("LDGSTS", "UTMALDG", "UBLKCP")
LOCAL = ("LDL", "STL")
OPCODES = (*MATRIX, *COPIES, "FFMA", *LOCAL)


@dataclass(frozen=True)
class Compiled:
    """One kernel's machine code.

    Attributes:
        registers: per thread.
        stack: bytes of local memory per thread; above 0 means that registers were spilled.
        shared: bytes of shared memory per program.
        num_warps: warps of a program.
        opcodes: number of occurrences of each instruction of `OPCODES` in the code.
    """

    kernel: str
    arch: int
    registers: int
    stack: int
    shared: int
    num_warps: int
    opcodes: Counter[str]

    @property
    def spills(self) -> bool:
        """Whether registers were spilled."""
        return self.stack > 0 or any(self.opcodes[name] for name in LOCAL)

    @property
    def fits(self) -> bool:
        """Whether the GPU has enough shared memory, which the compiler does not check."""
        return self.shared <= SHARED_MEMORY[self.arch]

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether products use tensor cores."""
        return any(self.opcodes[name] for name in MATRIX)


class _CompileOnly:
    """Replaces Triton's CUDA driver: has a target, and cannot run kernels."""

    compiles_only = True

    def __init__(self, capability: int):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # Triton caches kernels per device: one device per architecture

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


@contextmanager
def compiling(capability: int) -> Iterator[list[Any]]:
    """For the block, a launch compiles for `capability` and appends the kernel to the list.

    Raises KernelError if kernels are interpreted, or for an architecture that is not in
    `SHARED_MEMORY`.
    """
    if INTERPRETED:
        raise KernelError("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled.")
    if capability not in SHARED_MEMORY:
        known = ", ".join(map(str, SHARED_MEMORY))
        raise KernelError(f"the architecture is {capability}; known are {known}.")
    from triton.runtime.driver import driver

    before = getattr(driver, "_active", None)  # reading `active` would search for a GPU
    interface = triton.runtime.jit.KernelInterface
    launch, found = interface.__getitem__, []

    def compile_instead(kernel: Any, grid: Any) -> Callable:
        def compile_it(*args: Any, **kwargs: Any) -> None:
            found.append(kernel.warmup(*args, grid=grid, **kwargs))

        return compile_it

    driver.set_active(_CompileOnly(capability))
    interface.__getitem__ = compile_instead
    try:
        yield found
    finally:
        interface.__getitem__ = launch
        driver._active = before


def compile_for(capability: int, run: Callable[[], object]) -> list[Compiled]:
    """Compile every launch that `run` makes, for one architecture (80, 86, 89, 90, 100, 120)."""
    with compiling(capability) as found:
        run()
    return [inspect(kernel, capability) for kernel in found]


def inspect(kernel: Any, capability: int) -> Compiled:
    """Read a compiled kernel's resources and instructions with the tools in Triton's wheel."""
    registers, stack, counts = _machine_code(kernel.asm["cubin"])
    return Compiled(
        kernel=kernel.metadata.name,
        arch=capability,
        registers=registers,
        stack=stack,
        shared=kernel.metadata.shared,
        num_warps=kernel.metadata.num_warps,
        opcodes=Counter(dict(counts)),
    )


@lru_cache(maxsize=256)  # launches of several models often share a kernel
def _machine_code(binary: bytes) -> tuple[int, int, tuple[tuple[str, int], ...]]:
    """Registers, bytes of stack, and how often each of `OPCODES` occurs."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(binary)
        usage = _tool("cuobjdump", "--dump-resource-usage", cubin)
        # Like `cuobjdump -sass`, without encodings and control flow, which saves a quarter of the
        # time.
        code = _tool("nvdisasm", "--print-code", "--no-dataflow", cubin)

    def number(name: str) -> int:
        found = re.search(rf"\b{name}:(\d+)", usage)
        if found is None:
            raise KernelError(f"cuobjdump did not report {name}: {usage[:200]!r}")
        return int(found[1])

    counts = Counter(re.findall(r"\b(" + "|".join(OPCODES) + r")\b", code))
    return number("REG"), number("STACK"), tuple(counts.items())


def _tool(name: str, *arguments: str | Path) -> str:
    """Run one of NVIDIA's tools, and return its output."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    if not os.access(tool, os.X_OK):
        raise KernelError(f"This build of Triton has no {name}; use a Linux wheel of Triton.")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"{name} failed: {done.stderr.strip()[:300]}")
    return done.stdout
