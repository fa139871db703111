"""Grading Triton kernels: what is found interpreted, what would be found on a GPU, and what a
notebook saves. Our solution of e11.1 is changed in one place each time."""

import json
import linecache
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minillm_exercises import child, server
from minillm_exercises.capture import save_function
from minillm_exercises.grader import Grader
from minillm_exercises.limits import ON_GPU, Limits
from minillm_exercises.manifest import Exercise, load_manifest
from minillm_exercises.results import Verdict
from minillm_exercises.session import unavailable
from minillm_exercises.wording import crash_sentence
from minillm_exercises.workspace import Workspace

pytest.importorskip("triton")
EXERCISE = load_manifest()["e11.1"]
SOLUTION = (EXERCISE.answers / "solution.py").read_text(encoding="utf-8")
LAUNCH = SOLUTION[SOLUTION.index("    softmax_kernel[(rows,)](") :]
POWERS = "    powers = tl.exp(logits - largest)\n"
MASK = 'mask=at < length, other=float("-inf")'
Graded = Callable[..., Verdict]


@pytest.fixture(scope="module")
def grader() -> Grader:
    return Grader(EXERCISE, limits=Limits(cpu=2.0))


@pytest.fixture
def graded(grader: Grader, tmp_path: Path) -> Graded:
    """The verdict on our solution with some of its text replaced."""

    def grade(*swap: str) -> Verdict:
        text = SOLUTION
        for old, new in zip(swap[::2], swap[1::2], strict=True):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        path = tmp_path / "mine.py"
        path.write_text(text, encoding="utf-8")
        return grader.grade(path, diagnose=False)

    return grade


def result(verdict: Verdict, name: str) -> Any:
    return next(check for check in verdict.checks if check.name == name)


def said(verdict: Verdict, name: str = "test_by_hand") -> str:
    return result(verdict, name).message


# --- accesses outside of a tensor ---------------------------------------------------------------


def test_a_load_without_a_mask_names_kernel_program_argument_and_distance(graded: Graded) -> None:
    verdict = graded(MASK, "")
    assert verdict.status == "fail"
    message = said(verdict, "test_widths")
    assert message.startswith("Out of bounds: softmax_kernel, program (2, 0, 0), reads right ")
    assert "behind the end of x." in message
    assert "A mask keeps the others away" in message
    assert "tl.load(x + row * x_stride" in result(verdict, "test_widths").where
    assert "NaN at [0, 0], expected 0.0900306" in said(verdict)  # within x, behind a length


def test_how_far_outside_an_access_is(graded: Graded) -> None:
    near = graded("out + row * out_stride + at", "out + row * out_stride + at + 3 * columns")
    assert "writes right behind the end of out" in said(near)
    before = graded("x + row * x_stride + at", "x + row * x_stride + at - 2")
    assert "program (0, 0, 0), reads 8 bytes before the beginning of x" in said(before)
    far = graded("x + row * x_stride + at", "x + row * x_stride + at + (1 << 26)")
    assert "memory that is far from every tensor of the launch" in said(far)


def test_a_lane_without_other_holds_nothing(graded: Graded) -> None:
    verdict = graded(MASK, "mask=at < length")
    assert "masked lanes without other=" in said(verdict)


# --- what a kernel must not be ------------------------------------------------------------------

MISTAKES = [
    (("BLOCK: tl.constexpr", "BLOCK"), "test_by_hand", "declare the parameter as BLOCK: tl.const"),
    (("BLOCK=triton.next_power_of_2(columns)", "BLOCK=columns"), "test_widths",
     "round up with triton.next_power_of_2"),
    (("softmax_kernel[(rows,)](", "softmax_kernel("), "test_by_hand",
     "was called like a function of Python: a kernel is launched with its grid in brackets"),
    (("softmax_kernel[(rows,)](", "softmax_kernel[rows]("), "test_by_hand",
     "The grid is 3: it has to be a tuple"),
    (("columns, temperature,\n", "columns,\n"), "test_by_hand", "does not give all that the kern"),
    ((POWERS, f"{POWERS}    powers = powers + tl.arange(0, 2 * BLOCK)\n"), "test_by_hand",
     "Two tiles cannot be broadcast"),
    ((POWERS, f"{POWERS}    powers = pwers\n"), "test_by_hand", "name 'pwers' is not defined"),
    ((POWERS, f"    for i in range(3):\n        if i > 1:\n            break\n{POWERS}"),
     "test_compiles", "a kernel has no break"),
    ((POWERS, f"{POWERS}    powers = powers * ONE\n", "@triton.jit", "ONE = 1.0\n\n\n@triton.jit"),
     "test_compiles", "a compiled kernel sees no variables of your file"),
    (("columns, temperature,\n", "columns, temperature, WIDTH=3,\n"), "test_compiles",
     "names an argument that the kernel has not"),
]  # fmt: skip


@pytest.mark.parametrize(("swap", "check", "says"), MISTAKES, ids=lambda value: str(value)[:30])
def test_a_kernel_that_cannot_be(
    graded: Graded, swap: tuple[str, ...], check: str, says: str
) -> None:
    verdict = graded(*swap)
    assert verdict.status == "fail"
    assert says in said(verdict, check)


def test_what_only_the_compiler_refuses_passes_the_rest(graded: Graded) -> None:
    verdict = graded(*MISTAKES[7][0])
    assert [check.name for check in verdict.checks if check.status != "pass"] == ["test_compiles"]
    assert "On a GPU this would not compile, at \u201cbreak\u201d" in said(verdict, "test_compiles")


# --- who does without a kernel ------------------------------------------------------------------

HOSTS = [
    (f"    out.copy_(torch.exp(x))\n{LAUNCH}", "torch's exp runs outside of your kernels"),
    (f"{LAUNCH}    out[:] = x.softmax(1)\n", "softmax runs outside of your kernels"),
    (f"    try:\n        x.exp()\n    except BaseException:\n        pass\n{LAUNCH}",
     "torch's exp runs outside of your kernels"),
    (f"    rows = len(x.tolist())\n{LAUNCH}", "tolist() runs outside of your kernels"),
    (f"    int(lengths[0])\n{LAUNCH}", "int() runs outside of your kernels"),
    (f"    x.numpy()\n{LAUNCH}", "numpy() runs outside of your kernels"),
    (f"    f'{{x}}'\n{LAUNCH}", "runs outside of your kernels"),
    ("    out.fill_(0.0)\n", "softmax launched no kernel"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "says"), HOSTS, ids=lambda value: str(value)[:30].strip())
def test_arithmetic_on_the_host_is_refused(graded: Graded, body: str, says: str) -> None:
    verdict = graded(LAUNCH, body)
    assert verdict.status == "fail"
    assert says in said(verdict)


def test_an_empty_kernel_beside_the_host(graded: Graded) -> None:
    start = SOLUTION.index("    row = tl.program_id(0)")
    kernel = SOLUTION[start : SOLUTION.index("\n\n\ndef softmax")]
    empty = (kernel, "    tl.static_assert(BLOCK > 0)")
    assert "NaN at [0, 0], expected 0.0900306" in said(graded(*empty))
    beside = graded(*empty, LAUNCH, f"{LAUNCH}    out.copy_(x.softmax(1))\n")
    assert "softmax runs outside of your kernels" in said(beside)
    asked = graded(*empty, LAUNCH, f"{LAUNCH}    out.copy_(torch.softmax(x, 1))\n")
    assert asked.status == "refused"


def test_views_and_memory_are_free_and_copies_are_traffic(graded: Graded) -> None:
    free = "    torch.empty(3, device=x.device).view(3, 1)\n    torch.zeros_like(x)[1:].t()\n"
    assert graded(LAUNCH, free + LAUNCH).status == "pass"
    verdict = graded(LAUNCH, f"    x = x.clone()\n{LAUNCH}")
    failed = [check.name for check in verdict.checks if check.status != "pass"]
    assert failed == ["test_traffic"]
    assert "0 bytes" in said(verdict, "test_traffic") or "copied" in said(verdict, "test_traffic")


@pytest.mark.parametrize(
    ("swap", "says"),
    [
        ((LAUNCH, f"    torch.compile(softmax)\n{LAUNCH}"), "'torch.compile' is not for this"),
        (("import torch\n", "import torch\nimport minillm_kernels.fused\n"), "import of 'minillm_"),
        (("import torch\n", "import torch\nfrom triton.runtime import jit\n"), "'triton.runtime'"),
    ],
)
def test_who_asks_others_is_refused(graded: Graded, swap: tuple[str, ...], says: str) -> None:
    verdict = graded(*swap)
    assert verdict.status == "refused"
    assert says in verdict.message


# --- who does not come back ---------------------------------------------------------------------


def test_an_endless_loop_in_a_kernel_is_found_by_line(graded: Graded) -> None:
    loop = f"{POWERS}    while True:\n        powers = powers + 1\n"
    verdict = graded(POWERS, loop)
    assert verdict.status == "timeout"
    assert "Used 2 s of processor time" in verdict.message
    assert "powers = powers + 1" in verdict.message


def test_an_endless_loop_beside_a_kernel_shows_its_values(graded: Graded) -> None:
    verdict = graded(LAUNCH, f"    while True:\n        rows += 1\n{LAUNCH}")
    assert verdict.status == "timeout"
    assert "x = a tensor of shape (3, 4) starting 1, 3, 2" in verdict.message


@pytest.mark.parametrize("swap", [(POWERS, f"{POWERS}    exit()\n"), (LAUNCH, "    exit()\n")])
def test_exit_is_a_crash_of_the_submission(graded: Graded, swap: tuple[str, str]) -> None:
    verdict = graded(*swap)
    assert verdict.status == "crashed"
    assert "Your code ended the program" in verdict.message


# --- a GPU that is not there --------------------------------------------------------------------


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


def test_a_circle_of_causes_ends() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not child._lost_gpu(one)
    for text in ("CUDA error: unspecified launch failure", "Triton Error [CUDA]: misaligned"):
        other.args = (text,)
        assert child._lost_gpu(one)


def test_other_faults_of_a_gpu_are_told_as_they_are() -> None:
    report = {"check": "x", "kind": "gpu", "message": "CUDA error: unspecified launch failure"}
    assert "CUDA error: unspecified launch failure" in crash_sentence(report, 0, "", "y", ON_GPU)


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


def test_guards_notice_one_element_on_each_side_and_between_rows() -> None:
    told = alone(GUARDS)
    assert "one of them 1 elements before its beginning" in told["-1"]
    assert "one of them 1 elements behind its end" in told["8"]
    assert "between its rows, 3 elements behind its beginning" in told["3"]
    assert all(text.startswith("Out of bounds (a case): 1 elements") for text in told.values())


def test_with_a_gpu_kernels_are_compiled_and_counted(tmp_path: Path) -> None:
    told = alone(LAUNCHES, GPU, str(tmp_path))
    assert (told["device"], told["interpreted"], told["mode"]) == ("cuda", False, "0")
    assert told["launches"] == [["kernel", 8]]  # the other file's kernel is not the learner's
    assert told["ran"] == [[4, 2], [7], [1]]
    assert told["waited"]


def test_who_wants_the_interpreter_on_a_gpu_gets_it() -> None:
    pretend = f"os.environ['TRITON_INTERPRET'] = '1'\n{GPU}"
    assert alone("TOLD['device'] = t.DEVICE", pretend) == {"device": "cpu"}


def test_without_triton_an_exercise_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else 1)
    assert unavailable(EXERCISE) == "needs triton"


# --- from a notebook ----------------------------------------------------------------------------

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


@pytest.mark.parametrize("interpreted", ["1", "0"])
def test_a_notebook_saves_kernels_with_what_they_use(
    grader: Grader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreted: str
) -> None:
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
    assert grader.grade(path).status == "pass"
