"""From cells to the learner's file: cells are run as Jupyter runs them, and one test is Jupyter."""

import json
import linecache
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minillm_exercises.capture import save_function
from minillm_exercises.errors import ExerciseError
from minillm_exercises.grader import grade
from minillm_exercises.manifest import load_manifest
from minillm_exercises.report import check_here, hint_here
from tests.course.small import MUTANT, SOLUTION, Terminal, terminal


class Notebook:
    """Cells that share their variables; each is its own file for linecache, as in Jupyter."""

    def __init__(self, at: Terminal) -> None:
        self.at = at
        self.names: dict[str, Any] = {"__name__": "__main__", "In": [""]}

    def run(self, text: str) -> None:
        """Run a cell."""
        self.names["In"].append(text)
        file = f"<cell {len(self.names['In'])} of {id(self)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), self.names)

    def save(self, *names: str, exercise: str = "e90.1") -> str:
        """Save these names into the learner's file and return what is in it, without the stamp."""
        objects = [self.names[name] for name in names]
        path = save_function(self.at.exercise(exercise), objects, self.at.session.workspace)
        first, rest = path.read_text().split("\n", 1)
        assert first.startswith(f"# minillm exercise {exercise}, starter ")
        return rest

    def alone(self, *names: str, exercise: str = "e90.1") -> dict[str, Any]:
        """What the saved file defines when it runs alone."""
        fresh: dict[str, Any] = {"__name__": "saved"}
        exec(compile(self.save(*names, exercise=exercise), "saved.py", "exec"), fresh)
        return fresh


@pytest.fixture
def book(tmp_path: Path) -> Notebook:
    return Notebook(terminal(tmp_path))


def test_a_function_with_the_starters_imports(book: Notebook) -> None:
    book.run("x = 1\n\ndef add(a, b):\n    # a comment\n    return a + b\n\nadd(1, 2)")
    text = book.save("add")
    assert "import math" in text
    assert "def add(a, b):\n    # a comment\n    return a + b\n" in text
    assert "x = 1" not in text
    assert "add(1, 2)" not in text.split('"""')[2]


def test_what_it_uses_comes_along_in_order(book: Notebook) -> None:
    book.run("import itertools as it\nfrom collections import deque\nfrom os.path import join")
    book.run("SIZES = (1, 2.5, {'a': [None, True]})\nunused = 3\nBlock = list[int]")
    book.run("def one(a: Block):\n    return two(a) if a else deque([0])")
    book.run("def two(a):\n    return one(a - 1)")
    book.run("double = lambda x: 2 * x")
    book.run(
        "class Base:\n    def value(self):\n        return SIZES[0]\n\n"
        "class Sum(Base):\n    @property\n    def b(self):\n        return next(it.count(5))"
    )
    book.run(
        "def add(a, b, start=SIZES[1]):\n"
        "    unused = 4\n"
        "    return one(a)[0] + double(b) + Sum().value() + Sum().b + start + unused"
    )
    text = book.save("add")
    for absent in ("unused = 3", "join"):
        assert absent not in text
    order = [text.index(x) for x in ("import itertools as it", "SIZES =", "class Base", "class Sum",
                                     "def add")]  # fmt: skip
    assert order == sorted(order)
    assert book.alone("add")["add"](1, 2) == book.names["add"](1, 2) == 0 + 4 + 1 + 5 + 2.5 + 4


def test_the_cell_that_ran_last_counts(book: Notebook) -> None:
    book.run("def add(a, b):\n    return helper(a)")
    book.run("def helper(a):\n    return 1")
    book.run("LIMIT = 1")
    book.run("def helper(a):\n    return LIMIT")
    book.run("LIMIT = 2")
    assert book.alone("add")["add"](0, 0) == 2


def test_classes_and_decorators(book: Notebook) -> None:
    book.run("import functools\nfrom dataclasses import dataclass")
    book.run(
        "def logged(f):\n    @functools.wraps(f)\n    def inner(*a):\n        return f(*a)\n"
        "    return inner"
    )
    book.run("@dataclass\nclass Start:\n    value: int = 40")
    book.run("@dataclass\nclass Counter:\n    start: Start\n\n    def get(self):\n"
             "        return self.start.value")  # fmt: skip
    book.run("@logged\n@functools.lru_cache\ndef add(a, b):\n    return Counter(Start()).get() + a")
    saved = book.alone("add")
    assert saved["add"](2, 0) == 42
    assert "@logged\n@functools.lru_cache\ndef add" in book.save("add")
    assert book.alone("Counter", exercise="e90.2")["Counter"](saved["Start"]()).get() == 40


GIVEN = """import math


def scale(x):
    return 3 * shift(x) + math.floor(0.5)


def shift(x):
    # given, too
    return x + 1


def unused(x):
    return x


def add(a, b):
    raise NotImplementedError("TODO e90.1")
"""


def test_what_the_starter_gives_comes_along(book: Notebook) -> None:
    book.at.exercise().starter.write_text(GIVEN)
    book.run("def add(a, b):\n    return helper(a) + b\n\ndef helper(a):\n    return scale(a)")
    text = book.save("add")
    assert "def unused" not in text
    assert text.count("def add") == 1
    assert "    # given, too\n" in text
    assert text.index("def shift") < text.index("def scale") < text.index("def helper")
    assert book.alone("add")["add"](1, 5) == 11
    book.run("def shift(x):\n    return 10 * x")  # a cell's own comes first
    saved = book.alone("add")
    assert saved["add"](1, 5) == 3 * 10 + 5
    assert book.save("add").count("def shift") == 1


def test_future_imports_stay_first(book: Notebook) -> None:
    starter = book.at.exercise().starter
    starter.write_text("import math\nfrom __future__ import annotations\n")
    book.run("def add(a, b):\n    return a")
    assert book.alone("add")["add"](1, 2) == 1


def test_a_ring_without_a_cell_for_rotate(book: Notebook) -> None:
    """e03.2 as a reader of the notebook writes it: the class alone."""
    exercise = load_manifest()["e03.2"]
    text = (exercise.answers / "solution.py").read_text()
    book.run("import torch\nfrom torch import Tensor")
    book.run(text[text.index("class RingCache") :])
    ring = book.names["RingCache"]
    path = save_function(exercise, [ring, ring.append], book.at.session.workspace)
    assert path.read_text().count("def rotate(x: Tensor, positions: Tensor) -> Tensor:") == 1
    verdict = grade(exercise, path)
    assert verdict.status == "pass", verdict


COUNTER = "class Counter:\n    def __init__(self):\n        self.count = 0\n\n    def add(self):\n"


def test_a_method_stands_for_its_class(book: Notebook) -> None:
    book.run(COUNTER + "        self.count += 1")
    counter, at = book.names["Counter"], book.at
    for objects in ([counter, counter.add], [counter.add], [counter.add, counter, counter]):
        path = save_function(at.exercise("e90.2"), objects, at.session.workspace)
        assert path.read_text().count("class Counter:") == 1
    book.run("class Other:\n    def add(self):\n        return 1")
    with pytest.raises(ExerciseError, match="`Counter`, and yours is called `add`"):
        save_function(at.exercise("e90.2"), [book.names["Other"].add], at.session.workspace)


def test_a_name_in_quotes(book: Notebook) -> None:
    book.run(COUNTER + "        self.count += 1")
    shown = repr(check_here("e90.2", "Counter", session=book.at.session))
    assert shown == (
        "e90.2 asks for `Counter` itself; 'Counter' is only a text. Write it without quotes: "
        'check("e90.2", Counter).'
    )


REFUSED = [
    ("add = lambda a, b: a", "add", "write it with def"),
    ("add = len", "add", "is a builtin"),
    ("add = 3", "add", "3 is of type int"),
    ("from os.path import join as add", "add", r"join was imported from posixpath"),
    ("def ad(a, b):\n    return a", "ad", r"yours is called `ad`: rename it. Did you mean 'add'"),
    ("def make():\n    def add(a, b):\n        return a\n    return add\nadd = make()", "add",
     "defined inside another function"),
    ("data = object()\ndef add(a, b):\n    return data", "add",
     r"`add` uses `data`, a object from another cell"),
    ("class Size:\n    pass\nsize = Size()\ndef add(a, b):\n    return size", "add",
     r"`size` is an object of the class Size"),
    ("exec('def add(a, b): return a')", "add", "source of `add` is not available"),
    ("exec('class Gone: pass')\ndef add(a, b):\n    return Gone()", "add", "source of `Gone`"),
    ("rows = list(range(9999))\ndef add(a, b):\n    return rows", "add", "uses `rows`, a list"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name", "says"), REFUSED)
def test_what_cannot_be_saved_is_said(book: Notebook, text: str, name: str, says: str) -> None:
    book.run(text)
    with pytest.raises(ExerciseError, match=says):
        book.save(name)
    assert not book.at.file().exists()


def test_check_saves_grades_and_remembers(book: Notebook) -> None:
    book.run(MUTANT)
    shown = check_here("e90.1", book.names["add"], session=book.at.session)
    text = repr(shown)
    assert not shown.passed
    assert "not yet  negative numbers  0/2" in text
    assert "Perhaps: You add the sizes: a minus counts." in text
    assert 'Stuck: hint("e90.1")' in text
    assert book.at.session.progress().of("e90.1").attempts == 1
    assert "not yet  negative numbers" in book.at.type("run")[1]  # the same file
    assert repr(check_here("e90.1", session=book.at.session)) == text  # and no clock in it
    book.run(SOLUTION)
    shown = check_here("e90.1", book.names["add"], session=book.at.session)
    assert shown.passed
    assert "3 of 3 points, public checks 2/2" in repr(shown)


def test_the_page_shows_what_the_text_shows(book: Notebook) -> None:
    book.run("def add(a, b):\n    print('<b>&')\n    return '<i>'")
    shown = check_here("e90.1", book.names["add"], session=book.at.session)
    page = shown._repr_html_()
    assert "<i>" not in page
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;" in page
    words = re.sub(r"<[^>]*>", " ", page)
    for line in ("small numbers", "negative numbers", "0/2", "Your code printed"):
        assert line in words
        assert line in repr(shown)


def test_check_never_raises(book: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    session = book.at.session
    assert "Did you mean" in repr(check_here("e90.l", session=session))
    assert "is not begun" in repr(check_here("e90.1", session=session))
    assert "write it with def" in repr(check_here("e90.1", lambda: 0, session=session))
    assert "Did you mean" in repr(hint_here("e90.l", session=session))
    monkeypatch.setattr(type(session), "find", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in repr(check_here("e90.1", session=session))
    assert "ZeroDivisionError" in repr(hint_here("e90.1", session=session))


def test_hints_in_a_notebook(book: Notebook) -> None:
    shown = repr(hint_here("e90.1", session=book.at.session))
    assert shown == 'Hint 1 of 3: think of a sum\nAnother: hint("e90.1")'
    hint_here("e90.1", session=book.at.session)
    assert repr(hint_here("e90.1", session=book.at.session)).endswith("That was the last.")
    assert book.at.session.progress().of("e90.1").hints == 3


CELLS = [
    "from math import sqrt\nROOT = 2",
    "%time x = 1\ndef half(n):\n    return ROOT * n / 4",
    "class Counter:\n    def __init__(self):\n        self.count = 0\n\n"
    "    def add(self):\n        self.count += round(half(sqrt(4)))",
    "import pathlib, sys\nfrom tests.course.small import terminal\n"
    "from minillm_exercises.report import check_here\n"
    "at = terminal(pathlib.Path({folder!r}))\n"
    "check_here('e90.2', Counter, session=at.session)",
]


@pytest.mark.slow
def test_in_jupyter(tmp_path: Path) -> None:
    """The real kernel: cells have names under a temporary folder, and a magic is translated."""
    import nbformat.v4 as v4

    cells = [v4.new_code_cell(text.replace("{folder!r}", repr(str(tmp_path)))) for text in CELLS]
    source = tmp_path / "book.ipynb"
    source.write_text(json.dumps(v4.new_notebook(cells=cells)))
    code = (
        "import sys, nbformat, nbclient\n"
        "book = nbformat.read(sys.argv[1], 4)\n"
        "nbclient.NotebookClient(book, kernel_name='python3', timeout=300).execute()\n"
        "print(book.cells[-1].outputs[-1].data['text/plain'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source)], capture_output=True, text=True, timeout=600,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert "3 of 3 points" in done.stdout, done.stdout + done.stderr[-2000:]
