"""What the guard refuses before anything runs, and what it lets through."""

from dataclasses import replace
from pathlib import Path

import pytest

from minillm_exercises.guard import MAX_BYTES, inspect_source
from minillm_exercises.manifest import Exercise

EXERCISE = Exercise(
    id="e92.1", folder=Path("e92"), title="", chapter="92", minutes=1, difficulty=1,
    names=("append", "Cache.read"), hints=("a", "b", "c"), imports=("math", "torch"),
    banned=("torch.nn.functional.softmax", "cumsum", "sorted"),
)  # fmt: skip
COMPLETE = "def append(x): return x\nclass Cache:\n    def read(self): pass\n"

REFUSED = [  # source, what the first line of the message says
    ("def append(x)\n    return x", "Line 1 is not Python: expected ':'"),
    ("x = (1,\n", "'(' was never closed"),
    ("def append(x):\nreturn x", "Line 2 is not Python: expected an indented block"),
    ("import minillm", "build it yourself. Allowed here: math, torch"),
    ("from minillm.models import cache", "build it yourself"),
    ("from . import solution", "build it yourself"),
    ("import os", "Line 1: import of 'os'"),
    ("import torchvision", "import of 'torchvision'"),
    ("x = 1\nimport sys, math", "Line 2: import of 'sys'"),
    ("def f():\n    import subprocess", "Line 2: import of 'subprocess'"),
    ("import importlib.util", "import of 'importlib.util'"),
    ("__import__('os')", "'__import__' is not for this exercise"),
    ("eval('1')", "'eval' is not"),
    ("exec('1')", "'exec' is not"),
    ("open('x')", "reads and writes no files"),
    ("input()", "without a keyboard"),
    ("breakpoint()", "print instead"),
    ("globals()", "'globals' is not"),
    ("print.__globals__", "'__globals__' is not"),
    ("().__class__.__base__.__subclasses__()", "is not for this exercise"),
    ("from math import *", "import the names that you use"),
    ("import torch\ntorch.nn.functional.softmax(x)", "'torch.nn.functional.softmax' does what"),
    ("import torch.nn.functional as F\nF.softmax(x)", "Line 2: 'torch.nn.functional.softmax'"),
    ("from torch.nn import functional as F\nF.softmax(x)", "'torch.nn.functional.softmax'"),
    ("from torch.nn.functional import softmax as s", "'torch.nn.functional.softmax'"),
    ("x.cumsum(0)", "'cumsum' does what e92.1 asks for"),
    ("import torch\ntorch.cumsum(x, 0)", "'cumsum' does what e92.1 asks for"),
    ("sorted(x)", "'sorted' does what"),
    ("import torch\ntorch.ops.aten.softmax(x)", "'torch.ops' is not for"),
    ("getattr(x, 'cumsum')", "'cumsum' does what"),
    ("getattr(x, 'cum' + 'sum')", "'getattr' with a computed name"),
    ("getattr(x, '__globals__')", "'__globals__' is not"),
    ("import torch\ntorch.allclose = len", "changes torch.allclose, which the checks use too"),
    ("import math\ndel math.pi", "changes math.pi"),
    ("x = '\x00'", "null bytes"),
]


@pytest.mark.parametrize(("source", "says"), REFUSED)
def test_refused_with_the_line_and_the_reason(source: str, says: str) -> None:
    finding = inspect_source(source, EXERCISE)
    assert finding is not None
    assert finding.status == "refused"
    assert says in finding.message
    assert "Traceback" not in finding.message


ACCEPTED = [
    "import math\nfrom math import sqrt\nimport torch\nfrom torch import nn",
    "from __future__ import annotations",
    "def softmax(x): return softmax(x)",
    "open = True\nx = open",
    "def f(input): return input",
    "def f(vars=()): return list(vars)",
    "import torch\ntorch.softmax",  # another name than the banned one
    "class A:\n    def cumsum(self): return self.cumsum()",
    "getattr(x, 'shape')",
    "self = 3\nself.x = 2",
    "from math import pi\npi = x\npi.y = 4",
    "# a comment\n\n",
    "x = 'import os; eval'",
]


@pytest.mark.parametrize("source", ACCEPTED)
def test_accepted(source: str) -> None:
    text = source if source.startswith("from __future__") else source + "\n"
    assert inspect_source(text + "\n" + COMPLETE, EXERCISE) is None


def test_the_line_is_shown_with_a_caret_under_the_place() -> None:
    finding = inspect_source("def append(x):\n    y = 2\n    return eval(x)\n", EXERCISE)
    assert finding is not None
    assert finding.message.splitlines() == [
        "Line 3: 'eval' is not for this exercise: it would hide from the checks what your code "
        "does.",
        "    return eval(x)",
        "           ^",
    ]


@pytest.mark.parametrize(("source", "missing", "near"), [
    (COMPLETE.replace("append", "appendd"), "'append'", "Did you mean 'appendd'?"),
    (COMPLETE.replace("read", "raed"), "'Cache.read'", "Did you mean 'Cache.raed'?"),
    ("", "'append'", "The starter has it: e92_1.py."),
    ("def f():\n    def append(x): pass\n" + COMPLETE[24:], "'append'", ""),
])  # fmt: skip
def test_a_missing_name_is_named_with_the_nearest(source: str, missing: str, near: str) -> None:
    finding = inspect_source(source, EXERCISE)
    assert finding is not None
    assert finding.status == "missing"
    assert finding.message.startswith(missing)
    assert near in finding.message


def test_a_special_method_is_no_misspelt_one() -> None:
    source = COMPLETE.replace("def read", "def __read__")
    finding = inspect_source(source, EXERCISE)
    assert finding is not None
    assert "Cache.read" in finding.message
    assert "Did you mean" not in finding.message


@pytest.mark.parametrize("source", [
    "append = lambda x: x\nclass Cache:\n    read = None",
    "append, y = 1, 2\nclass Cache:\n    def read(self): pass",
    "if True:\n    def append(x): pass\nclass Cache:\n    async def read(self): pass",
    "from math import sqrt as append\nclass Cache:\n    def read(self): pass",
])  # fmt: skip
def test_a_name_may_be_defined_in_any_way(source: str) -> None:
    assert inspect_source(source, EXERCISE) is None


def test_no_text_and_too_much_text() -> None:
    latin = inspect_source("x = 'é'".encode("latin-1"), EXERCISE)
    assert latin is not None
    assert "not UTF-8" in latin.message
    large = inspect_source("x = 1\n" * MAX_BYTES, EXERCISE)
    assert large is not None
    assert "200,000" in large.message
    deep = inspect_source("x = " + "(" * 5000 + ")" * 5000, EXERCISE)
    assert deep is not None
    assert deep.status == "refused"
    assert inspect_source("\ufeff".encode() + COMPLETE.encode(), EXERCISE) is None


def test_the_allowed_imports_are_the_exercises_own() -> None:
    more = replace(EXERCISE, imports=(*EXERCISE.imports, "os.path"))
    assert inspect_source("import os.path\n" + COMPLETE, more) is None
    assert inspect_source("import os\n" + COMPLETE, more) is not None
