"""Deliberately broken copies of a kernel file."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def mutant(module: ModuleType, old: str, new: str, folder: Path, count: int = 1) -> ModuleType:
    """The module with `old` replaced by `new` in its source; `old` must occur `count` times."""
    source = Path(str(module.__file__)).read_text("utf-8")
    found = source.count(old)
    assert found == count, f"{old!r} occurs {found} times in {module.__name__}, not {count}"
    path = folder / f"mutant_{module.__name__.split('.')[-1]}.py"
    path.write_text(source.replace(old, new), "utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = broken  # the interpreter looks up a function's module by name
    spec.loader.exec_module(broken)
    return broken
