"""Compile kernels for a GPU that is not there, and read what the compiler made of them.

Triton's compiler and the assembler it carries need no GPU. `compile_for` runs real launchers on
CPU tensors as stand-ins: every `kernel[grid](...)` inside is compiled for the architecture and
not run. `inspect` then counts registers, spills, shared memory and instructions in the machine
code (SASS).
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
# Instructions worth counting: tensor cores of Ampere, Hopper and Blackwell; asynchronous and bulk
# copies; a change of the register budget (warp specialisation); local memory, which is spilling.
MATRIX = ("HMMA", "HGMMA", "UTCHMMA", "IMMA")
COPIES = ("LDGSTS", "UTMALDG", "UBLKCP")
LOCAL = ("LDL", "STL")
OPCODES = (*MATRIX, *COPIES, "USETMAXREG", "FFMA", *LOCAL)


@dataclass(frozen=True)
class Compiled:
    """One kernel's machine code.

    Attributes:
        registers: per thread.
        stack: bytes of local memory per thread; above 0 means that registers were spilled.
        shared: bytes of shared memory per program.
        num_warps: of a program, those of a producer included.
        opcodes: how often each instruction of `OPCODES` stands in the code.
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
        """Whether values had to leave the registers."""
        return self.stack > 0 or any(self.opcodes[name] for name in LOCAL)

    @property
    def fits(self) -> bool:
        """Whether the chip has the shared memory; the compiler does not look."""
        return self.shared <= SHARED_MEMORY[self.arch]

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether products run on matrix units."""
        return any(self.opcodes[name] for name in MATRIX)


class _CompileOnly:
    """In the place of Triton's CUDA driver: it knows a target and can run nothing."""

    compiles_only = True

    def __init__(self, capability: int):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # compiled kernels are kept per device: one per architecture

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


@contextmanager
def compiling(capability: int) -> Iterator[list[Any]]:
    """Inside, a launch compiles for `capability` and appends what it compiled to the list.

    KernelError where kernels are interpreted, or for an architecture that is not in
    `SHARED_MEMORY`.
    """
    if INTERPRETED:
        raise KernelError("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled.")
    if capability not in SHARED_MEMORY:
        known = ", ".join(map(str, SHARED_MEMORY))
        raise KernelError(f"the architecture is {capability}; known are {known}.")
    from triton.runtime.driver import driver

    before = getattr(driver, "_active", None)  # reading `active` would look for a GPU
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
    """Read a compiled kernel's resources and instructions with the tools that Triton carries."""
    registers, stack, counts = _machine_code(kernel.asm["cubin"])
    return Compiled(
        kernel=kernel.metadata.name,
        arch=capability,
        registers=registers,
        stack=stack,
        shared=kernel.metadata.shared,
        num_warps=_num_warps(kernel),
        opcodes=Counter(dict(counts)),
    )


@lru_cache(maxsize=256)  # launches of several models often need the same kernel
def _machine_code(binary: bytes) -> tuple[int, int, tuple[tuple[str, int], ...]]:
    """Registers, bytes of stack, and how often each of `OPCODES` occurs."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(binary)
        usage = _tool("cuobjdump", "--dump-resource-usage", cubin)
        # What `cuobjdump -sass` asks, without the encodings and the flow of control: a quarter less
        # time, most of which the tool takes to start.
        code = _tool("nvdisasm", "--print-code", "--no-dataflow", cubin)

    def number(name: str) -> int:
        found = re.search(rf"\b{name}:(\d+)", usage)
        if found is None:
            raise KernelError(f"cuobjdump said nothing of {name}: {usage[:200]!r}")
        return int(found[1])

    counts = Counter(re.findall(r"\b(" + "|".join(OPCODES) + r")\b", code))
    return number("REG"), number("STACK"), tuple(counts.items())


def _num_warps(kernel: Any) -> int:
    """Warp specialisation adds warps that the launch did not ask for."""
    found = re.search(r"\.reqntid\s+(\d+)", kernel.asm["ptx"])
    return int(found[1]) // 32 if found else kernel.metadata.num_warps


def _tool(name: str, *arguments: str | Path) -> str:
    """What one of NVIDIA's tools prints about a file."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    if not os.access(tool, os.X_OK):
        raise KernelError(f"This build of Triton carries no {name}; its Linux wheels do.")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"{name} failed: {done.stderr.strip()[:300]}")
    return done.stdout
