"""Whether Triton's compiler takes a kernel, asked in a process whose kernels are interpreted.

The interpreter is more patient than the compiler: it runs a `break`, a list, or torch inside of
a kernel. What the compiler's first pass refuses is found in milliseconds and without a GPU, but a
process in which Triton was imported to interpret has no compiler that works. So Triton is imported
twice: this module keeps a copy of it that compiles, and puts it in the other's place for as long as
it is needed. The compiled library below both is the same.
"""

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import MappingProxyType, ModuleType
from typing import Any

from minillm_exercises.triton_mode import INTERPRETED

CAPABILITY = 80  # the oldest that the kernels of this course are for
SHARED = "triton._C"  # the library is loaded once
NEEDED = (
    "triton", "triton.language", "triton.compiler.compiler", "triton.compiler.code_generator",
    "triton.runtime.driver", "triton.runtime.jit", "triton.backends.compiler",
)  # fmt: skip


class _CompiledError(Exception):
    """The first pass is over; nothing further is wanted."""


class _NoGpu:
    """In the place of a driver: it knows what to compile for, and can run nothing."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        """What is compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """Any number."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Any number."""
        return 0


def _ours(name: str) -> bool:
    return name.partition(".")[0] == "triton" and not name.startswith(SHARED)


def _exchanged(modules: Mapping[str, ModuleType]) -> dict[str, ModuleType]:
    """Put these modules in the place of the Triton that is imported, which is returned."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _ours(name)}
    sys.modules.update(modules)
    return before


@contextmanager
def _environment(value: str) -> Iterator[None]:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _imported() -> MappingProxyType[str, ModuleType]:
    """A Triton of its own whose kernels stop behind the compiler's first pass."""
    before = _exchanged({})
    try:
        with _environment("0"):
            modules = {name: importlib.import_module(name) for name in NEEDED}
        compiler, driver = modules["triton.compiler.compiler"], modules["triton.runtime.driver"]
        compiler.get_cache_key = lambda *_, **__: "unused"  # type: ignore[attr-defined]
        make_ir = compiler.ASTSource.make_ir

        def first_pass(*args: Any, **options: Any) -> None:
            make_ir(*args, **options)
            raise _CompiledError

        compiler.ASTSource.make_ir = first_pass
        target = modules["triton.backends.compiler"].GPUTarget("cuda", CAPABILITY, 32)
        driver.driver.set_active(_NoGpu(target))
    finally:
        mine = _exchanged(before)
    return MappingProxyType(mine)


_COMPILER = _imported() if INTERPRETED else MappingProxyType({})


def compiled_launches(impl: ModuleType, call: Callable[[Any], object]) -> list[str]:
    """The kernels that `call(submission)` launches, each taken by the compiler's first pass.

    `impl` is the submission as it is graded; its file is loaded again. What the compiler raises
    passes through.
    """
    launched: list[str] = []

    def getitem(kernel: Any, grid: Any) -> Callable[..., None]:
        def compile_it(*args: Any, **options: Any) -> None:
            with contextlib.suppress(_CompiledError):
                kernel.warmup(*args, grid=grid, **options)
            launched.append(kernel.__name__)

        return compile_it

    interface = _COMPILER["triton.runtime.jit"].KernelInterface
    before, usual = _exchanged(_COMPILER), interface.__getitem__
    interface.__getitem__ = getitem
    try:
        with _environment("0"):
            call(_loaded(str(impl.__file__)))
    finally:
        interface.__getitem__ = usual
        _exchanged(before)
    return launched


def _loaded(file: str) -> ModuleType:
    """The submission once more, with the Triton that compiles."""
    loader = SourceFileLoader("submission_compiled", file)
    module = types.ModuleType(loader.name)
    module.__file__, module.__loader__ = file, loader
    sys.modules[module.__name__] = module
    loader.exec_module(module)
    return module
