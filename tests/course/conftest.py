"""The toy exercises that the graders are tried on: tests/course/toy, as tracked and as a copy."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from minillm_exercises import disturbance, doctor
from minillm_exercises.manifest import Exercise, load_manifest
from tests.course.small import Terminal, terminal

TOY = Path(__file__).parent / "toy"
collect_ignore = ["toy"]  # its test_*.py are the toys' checks

Change = Callable[[str], str]


class ToyRoot:
    """A copy of the toy exercises that a test may damage."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(TOY, root, ignore=shutil.ignore_patterns("__pycache__"))

    @property
    def manifest(self) -> dict[str, Exercise]:
        """The manifest as it is now."""
        return load_manifest(self.root)

    def edit(self, name: str, old: str | None, new: str) -> None:
        """Replace `old`, which must be there, in a file; "" is its end, and None the whole file."""
        file = self.root / name
        if old is None:
            return file.unlink()
        text = file.read_text("utf-8")
        if not old:
            return self.write(name, text + new)
        assert old in text, f"{old!r} is not in {name}"
        file.write_text(text.replace(old, new), "utf-8")

    def write(self, name: str, text: str) -> None:
        """Write a file."""
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")


@pytest.fixture(scope="session")
def toys() -> dict[str, Exercise]:
    """The toy exercises: e90.1 needs no torch, e91.1 does."""
    return load_manifest(TOY)


@pytest.fixture
def toy_root(tmp_path: Path) -> ToyRoot:
    """A copy of the toy exercises."""
    return ToyRoot(tmp_path / "toy")


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A learner with the small course. Asking torch for its device would take seconds."""
    monkeypatch.setattr(doctor, "torch_facts", lambda: {"device": "cpu"})
    return terminal(tmp_path)


@pytest.fixture(autouse=True)
def calm_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run at the same time; what measurements print must not depend on it."""
    monkeypatch.setattr(disturbance, "meter", lambda: SimpleNamespace(read=lambda: 0.0))


@pytest.fixture(autouse=True)
def no_figure_stays_open() -> Iterator[None]:
    """A test that keeps a figure from being shown also keeps it from being closed."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
