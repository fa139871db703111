"""Plants bugs: modules in whose source one text is replaced."""

import sys
from pathlib import Path
from types import CodeType, ModuleType

import pytest


def changed(module: ModuleType, right: str, wrong: str) -> CodeType:
    """The code of a module with `wrong` in place of `right`, which must be there once."""
    source = Path(str(module.__file__)).read_text("utf-8")
    assert source.count(right) == 1, right
    return compile(source.replace(right, wrong), str(module.__file__), "exec")


def broken(module: ModuleType, right: str, wrong: str) -> ModuleType:
    """A changed copy of a module."""
    copy = ModuleType(f"{module.__name__}_broken")
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    exec(changed(module, right, wrong), vars(copy))
    return copy


def plant(patch: pytest.MonkeyPatch, module: ModuleType, right: str, wrong: str) -> None:
    """Change a module itself, until the end of the test."""
    code = changed(module, right, wrong)
    for name, value in list(vars(module).items()):
        patch.setattr(module, name, value)  # put back at the end
    exec(code, vars(module))


def plant_everywhere(patch: pytest.MonkeyPatch, module: ModuleType, right: str, wrong: str) -> None:
    """`plant`, also into what other modules have imported from it."""
    before = dict(vars(module))
    plant(patch, module, right, wrong)
    ours = [user for name, user in sys.modules.items() if name.startswith(("minillm", "tests"))]
    for user in ours:
        for name, value in list(vars(user).items()) if user is not module else ():
            own = getattr(value, "__module__", None) == module.__name__
            if own and before.get(name) is value:
                patch.setattr(user, name, vars(module)[name])
