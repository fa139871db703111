"""A course of three small exercises in a temporary folder, graded by the real grader."""

import io
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from minillm_exercises.cli import main
from minillm_exercises.cli.app import App
from minillm_exercises.explain import Shell
from minillm_exercises.manifest import Exercise, load_manifest
from minillm_exercises.session import Session
from minillm_exercises.workspace import Workspace

MANIFEST = """
["e90.1"]
folder = "e90_sums"
title = "Add two numbers"
minutes = 5
difficulty = 1
names = ["add"]
hints = ["think of a sum", "look at +", "take a, go b steps on"]

["e90.2"]
folder = "e90_sums"
title = "A counter that remembers every value it was ever given, in the order of their arrival"
minutes = 10
difficulty = 3
names = ["Counter"]
hints = ["think", "look", "write"]

["e91.1"]
folder = "e91_kernels"
title = "Not for this machine"
minutes = 10
difficulty = 2
names = ["kernel"]
hints = ["think", "look", "write"]
needs = ["no_such_package"]
"""
README = """# Sums

## e90.1 Add two numbers

Write `add` so that
it returns the sum.

```python
def add(a, b) -> int
```

More about sums.

## e90.2 A counter

Count.
"""
STARTER = '''"""e90.1"""

import math


def add(a: int, b: int) -> int:
    """The sum."""
    raise NotImplementedError("TODO e90.1: add them")
'''
CHECKS = '''"""Checks."""

from minillm_exercises.checking import check, equal


@check(1, "small numbers")
def test_small(impl):
    equal(impl.add(1, 2), 3, "1 plus 2", "add(1, 2)")


@check(points=2, task="negative numbers")
def test_negative(impl):
    equal(impl.add(-1, 2), 1, "-1 plus 2", "add(-1, 2)")
'''
SOLUTION = '''"""The sum."""


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b
'''
MUTANT = SOLUTION.replace("a + b", "abs(a) + abs(b)")
MUTANTS = """[sizes]
teaches = "You add the sizes: a minus counts."
change = '''
-    return a + b
+    return abs(a) + abs(b)
'''
"""
COUNTER = '''class Counter:
    """Counts."""

    def __init__(self) -> None:
        raise NotImplementedError("TODO e90.2: begin at zero")
'''
COUNTER_CHECKS = """from minillm_exercises.checking import check, equal


@check(3, "counts")
def test_counts(impl):
    counter = impl.Counter()
    counter.add()
    equal(counter.count, 1, "after one add")
"""
FILES = {
    "exercises.toml": MANIFEST, "e90_sums/README.md": README, "e90_sums/e90_1.py": STARTER,
    "e90_sums/test_e90_1.py": CHECKS, "e90_sums/e90_2.py": COUNTER,
    "e90_sums/test_e90_2.py": COUNTER_CHECKS, "e91_kernels/e91_1.py": STARTER,
    "e91_kernels/test_e91_1.py": CHECKS, "_solutions/e90_1/solution.py": SOLUTION,
    "_solutions/e90_1/alternate.py": SOLUTION.replace("a + b", "sum((a, b))"),
    "_solutions/e90_1/mutants.toml": MUTANTS,
}  # fmt: skip


def write_course(root: Path) -> Path:
    """Write the course and return its folder."""
    for name, text in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@dataclass
class Terminal:
    """A learner at a terminal of this size; `type` runs a command and returns what it shows."""

    session: Session
    answers: list[str]
    width: int = 100

    def type(self, *words: str, colour: bool = False) -> tuple[int, str]:
        """Run a command in this process."""
        out = Console(
            file=io.StringIO(), width=self.width, highlight=False, markup=False, emoji=False,
            force_terminal=colour, color_system="standard" if colour else None, _environ={},
        )  # fmt: skip
        app = App(self.session, out, Shell("python"), self._answer)
        code = main(words, app)
        return code, out.file.getvalue()  # type: ignore[attr-defined]

    def sees(self, line: str, *texts: str, code: int = 0, lacks: Sequence[str] = ()) -> str:
        """Type a line: it ends with `code`, and shows all `texts` and none of `lacks`."""
        ended, shown = self.type(*shlex.split(line))
        assert ended == code, shown
        assert [text for text in texts if text not in shown] == [], shown
        assert [text for text in lacks if text in shown] == [], shown
        return shown

    def _answer(self, question: str) -> str:
        if not self.answers:
            raise EOFError
        return self.answers.pop(0)

    def exercise(self, name: str = "e90.1") -> Exercise:
        """An exercise of the course."""
        return self.session.manifest[name]

    def file(self, name: str = "e90.1") -> Path:
        """The learner's file of an exercise."""
        return self.session.workspace.file(self.exercise(name))

    def write(self, text: str, name: str = "e90.1") -> Path:
        """Write the learner's file below its stamp."""
        self.session.start(self.exercise(name))
        path = self.file(name)
        path.write_text(path.read_text().splitlines(keepends=True)[0] + text)
        return path


def terminal(folder: Path) -> Terminal:
    """A learner with the small course, and nothing begun."""
    manifest = load_manifest(write_course(folder / "exercises"))
    return Terminal(Session(manifest, Workspace(folder / "work")), [])
