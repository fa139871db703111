"""Grading Triton kernels: what would be found on a GPU, and what a notebook saves. What is found
interpreted stands in strangers.toml of e11.1 and e11.2 (test_strangers.py)."""

import json
import linecache
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minillm_exercises import server
from minillm_exercises.capture import save_function
from minillm_exercises.grader import Grader, grade
from minillm_exercises.limits import ON_GPU
from minillm_exercises.manifest import Exercise, load_manifest
from minillm_exercises.session import unavailable
from minillm_exercises.workspace import Workspace

pytest.importorskip("triton")
EXERCISE = load_manifest()["e11.1"]
SOLUTION = (EXERCISE.answers / "solution.py").read_text(encoding="utf-8")


def test_what_cuda_says_ends_the_process_and_not_the_grader(toys: dict[str, Exercise]) -> None:
    text = (toys["e90.1"].answers / "solution.py").read_text(encoding="utf-8")
    anchor = "    starts = "
    fault = "    raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
    grader = Grader(toys["e90.1"])
    verdict = grader.run(text.replace(anchor, fault + anchor))
    assert verdict.status == "crashed"
    assert "it touched memory that is not its own" in verdict.message
    assert "TRITON_INTERPRET=1" in verdict.message
    assert [check.status for check in verdict.checks] == ["error", "not run", "not run"]
    assert grader.run(text).status == "pass"


def test_compiled_kernels_get_the_limits_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "minillm_exercises.triton_mode"
    for interpreted in (False, True):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(INTERPRETED=interpreted))
        assert server._on_gpu() is not interpreted
    monkeypatch.delitem(sys.modules, name)
    assert not server._on_gpu()
    assert ON_GPU.memory is None
    assert ON_GPU.cpu > 10


ALONE = """
import json, os, sys, types, torch
TOLD = {}
PRETEND
from minillm_exercises import triton_checks as t
from minillm_exercises.checking import CheckFailedError
CODE
print(json.dumps(TOLD))
"""
GUARDS = """
out = t.output(2, 3, strides=(5, 1))
for where in (t.GUARD - 1, t.GUARD + 8, t.GUARD + 3):
    out.buffer.copy_(out.before)
    out.view.fill_(1.0)
    out.unharmed("out")
    out.buffer[where] = 7.0
    try:
        out.unharmed("out", "a case")
    except CheckFailedError as error:
        TOLD[where - t.GUARD] = str(error)
"""
LAUNCHES = """
from pathlib import Path
from triton.runtime.jit import JITFunction
ran = []
JITFunction.run = lambda self, *args, grid, warmup, **options: ran.append(grid({"N": 4}))

def load(name):
    path = Path(sys.argv[1]) / name
    path.write_text("import triton\\n\\n@triton.jit\\ndef kernel(x, N):\\n    pass\\n")
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(path.read_text(), str(path), "exec"), vars(module))
    return module

impl, other = load("mine.py"), load("other.py")
torch.accelerator.synchronize = lambda: TOLD.update(waited=True)
with t.watching(impl) as seen:
    impl.kernel[lambda meta: (meta["N"], 2)](torch.zeros(1), 3)
    other.kernel[(7,)](torch.zeros(1), 3)
t.compiles(impl, lambda impl: impl.kernel[lambda meta: (1,)](torch.zeros(1).exp(), 3), 1, "it")
TOLD.update(device=t.DEVICE, interpreted=t.INTERPRETED, mode=os.environ["TRITON_INTERPRET"])
TOLD.update(launches=[[launch.kernel, launch.programs] for launch in seen.launches], ran=ran)
"""
GPU = "torch.accelerator.current_accelerator = lambda check_available: torch.device('cuda')"


def alone(code: str, pretend: str = "", *arguments: str) -> dict[str, Any]:
    """What a process of its own notes in TOLD: Triton is imported there for the first time."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    text = ALONE.replace("PRETEND", pretend).replace("CODE", code)
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments], capture_output=True, text=True, check=False,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_guards_notice_one_element_on_each_side_and_between_rows() -> None:
    told = alone(GUARDS)
    assert "one of them 1 elements before its beginning" in told["-1"]
    assert "one of them 1 elements behind its end" in told["8"]
    assert "between its rows, 3 elements behind its beginning" in told["3"]
    assert all(text.startswith("Out of bounds (a case): 1 elements") for text in told.values())


@pytest.mark.slow
def test_with_a_gpu_kernels_are_compiled_and_counted(tmp_path: Path) -> None:
    told = alone(LAUNCHES, GPU, str(tmp_path))
    assert (told["device"], told["interpreted"], told["mode"]) == ("cuda", False, "0")
    assert told["launches"] == [["kernel", 8]]  # the other file's kernel is not the learner's
    assert told["ran"] == [[4, 2], [7], [1]]
    assert told["waited"]


@pytest.mark.slow
def test_who_wants_the_interpreter_on_a_gpu_gets_it() -> None:
    pretend = f"os.environ['TRITON_INTERPRET'] = '1'\n{GPU}"
    assert alone("TOLD['device'] = t.DEVICE", pretend) == {"device": "cpu"}


def test_without_triton_an_exercise_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else 1)
    assert unavailable(EXERCISE) == "needs triton"


CELLS = (
    "import torch\nimport triton\nimport triton.language as tl",
    "LOWEST = tl.constexpr(float('-inf'))",
    "@triton.jit\ndef shares(logits, LIMIT: tl.constexpr):\n"
    "    largest = tl.max(logits, axis=0)\n"
    "    largest = tl.where(largest == LOWEST, 0.0, largest)\n"
    "    powers = tl.exp(logits - largest)\n"
    "    total = tl.sum(powers, axis=0)\n"
    "    return powers / tl.where(total == 0.0, 1.0, total)",
    SOLUTION[SOLUTION.index("@triton.jit") : SOLUTION.index("    largest = ")].replace(
        'float("-inf")', "LOWEST"
    )
    + "    tl.store(out + row * out_stride + at, shares(logits, BLOCK), mask=at < columns)",
    SOLUTION[SOLUTION.index("def softmax(") :],
)


@pytest.mark.slow
@pytest.mark.parametrize("interpreted", ["1", "0"])
def test_a_notebook_saves_kernels_with_what_they_use(tmp_path, monkeypatch, interpreted):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    names: dict[str, Any] = {"__name__": "__main__", "In": [""]}
    for number, text in enumerate(CELLS):
        names["In"].append(text)
        file = f"<cell {number} of {tmp_path}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), names)
    path = save_function(EXERCISE, [names["softmax"]], Workspace(tmp_path))
    saved = path.read_text(encoding="utf-8")
    assert saved.count("@triton.jit") == 2
    assert (
        saved.index("def shares") < saved.index("def softmax_kernel") < saved.index("def softmax(")
    )
    assert "LOWEST = tl.constexpr(float('-inf'))" in saved
    assert grade(EXERCISE, path).status == "pass"
