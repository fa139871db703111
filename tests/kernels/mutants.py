"""Deliberately broken copies of kernel files, and the cases that have to convict them."""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from minillm_kernels.check.case import Mismatch


def mutant(
    modules: ModuleType | Sequence[ModuleType], old: str, new: str, folder: Path
) -> ModuleType:
    """A copy of the first module with `new` for `old`, in the file that has it most often.

    The others are the files that it imports, each before those that it imports itself.
    """
    files = [modules] if isinstance(modules, ModuleType) else list(modules)
    sources = {file: Path(str(file.__file__)).read_text("utf-8") for file in files}
    changed = max(files, key=lambda file: sources[file].count(old))
    assert old in sources[changed], f"{old!r} is not in {changed.__name__}"
    sources[changed] = sources[changed].replace(old, new)
    package = sys.modules["minillm_kernels"]
    copy = files[0]
    try:
        for file in reversed(files):
            name = file.__name__.split(".")[-1]
            path = folder / f"mutant_{name}.py"
            path.write_text(sources[file], "utf-8")
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            copy = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = copy  # the interpreter looks up a function's module by name
            sys.modules[file.__name__] = copy  # what imports this file imports the copy
            setattr(package, name, copy)
            spec.loader.exec_module(copy)
    finally:
        for file in files:
            sys.modules[file.__name__] = file
            setattr(package, file.__name__.split(".")[-1], file)
    return copy


def convicted(verify: Callable[..., None], cases: Iterable[Any], kernels: ModuleType) -> bool:
    """Whether a case shows the bug of `kernels`, by a wrong result or a wrong access.

    Anything else is no bug of ours, but a typing error in it.
    """
    for case in cases:
        try:
            verify(case, "cpu", kernels)
        except Mismatch:
            return True
        except Exception as error:
            if "OutOfBoundsError" not in str(error) and "OutOfBounds" not in type(error).__name__:
                raise
            return True
    return False
