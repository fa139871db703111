"""Grading the toy exercises: correct, wrong, unfinished and hostile submissions.

The limits are small so that an endless loop ends soon; nothing else comes near them.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minillm_exercises.child import Job
from minillm_exercises.errors import ExerciseError
from minillm_exercises.grader import VACUOUS, Grader, grade, list_checks
from minillm_exercises.limits import Limits
from minillm_exercises.manifest import Exercise
from minillm_exercises.results import CheckResult, Verdict, same_behaviour
from minillm_exercises.server import load_checks, supervise
from tests.course.conftest import TOY, ToyRoot
from tests.course.submissions import Graded, solution, statuses, with_first

LIMITS = Limits(cpu=1.0, wall=600.0)
Toys = dict[str, Exercise]
NAMES = ["test_one_window", "test_windows", "test_meter"]


def written(folder: Path, source: str) -> Path:
    """The file of somebody who wrote this."""
    path = folder / "mine.py"
    path.write_text(source, "utf-8")
    return path


@pytest.fixture(scope="module")
def graders(toys: Toys) -> dict[str, Grader]:
    """One grader per toy for the whole file, which remembers what known mistakes look like."""
    return {"e90.1": Grader(toys["e90.1"], limits=LIMITS), "e91.1": Grader(toys["e91.1"])}


@pytest.fixture
def graded(graders: dict[str, Grader], tmp_path: Path) -> Graded:
    """Grade a text as a submission of e90.1, or another."""

    def grade_text(source: str, exercise_id: str = "e90.1") -> Verdict:
        file = tmp_path / "mine.py"
        file.write_text(source, "utf-8")
        return graders[exercise_id].grade(file)

    return grade_text


@pytest.fixture
def unguarded(graders: dict[str, Grader]) -> Graded:
    """Run a text as a submission of e90.1 although the guard might refuse it."""
    return graders["e90.1"].run


# --- what comes out of ordinary submissions ---------------------------------------------------


@pytest.mark.parametrize("exercise_id", ["e90.1", "e91.1"])
def test_the_starter_is_still_to_do(toys: Toys, exercise_id: str) -> None:
    verdict = grade(toys[exercise_id], toys[exercise_id].starter)
    assert verdict.status == "todo"
    assert verdict.message.startswith(f"Still to do: TODO {exercise_id}: ")
    assert set(statuses(verdict)) == {"not run"}
    assert "raise NotImplementedError" in verdict.checks[0].where


def test_half_done_is_still_to_do(toys: Toys, graded: Graded) -> None:
    start = toys["e90.1"].starter.read_text("utf-8")
    todo = 'raise NotImplementedError("TODO e90.1: sum every window")'
    verdict = graded(start.replace(todo, "return [sum(numbers)]"))
    assert verdict.status == "fail"  # one window only
    verdict = graded(
        start.replace(todo, "return [sum(numbers[i:i+size]) for i in range(len(numbers)-size+1)]")
    )
    assert verdict.status == "todo"
    assert verdict.message == "Still to do: TODO e90.1: the largest so far"
    assert statuses(verdict) == ["pass", "pass", "not run"]
    assert verdict.earned == 3


def test_a_name_costs_one_run_of_each_mutant_and_one_more(toys: Toys, monkeypatch) -> None:
    mutants = toys["e90.1"].mutants
    grader = Grader(toys["e90.1"])
    verdict = grader.run(mutants[0].source)
    runs, run = [], grader.run
    monkeypatch.setattr(grader, "run", lambda *a, **k: runs.append(a) or run(*a, **k))
    assert grader.diagnose(verdict).mutant == mutants[0].name
    assert len(runs) == len(mutants) + 1


def test_a_bare_no_names_nobody_who_differs_elsewhere(toy_root: ToyRoot, tmp_path: Path) -> None:
    toy_root.edit(
        "e90_windows/test_e90_1.py",
        'equal(impl.window_sums([1, 2, 3], 3), [6], "one window", "window_sums([1, 2, 3], 3)")',
        'expect(impl.window_sums([1, 2, 3], 3) == [6], "the sum of all")',
    )
    toy_root.edit("e90_windows/test_e90_1.py", "import check, ", "import check, expect, ")
    exercise = toy_root.manifest["e90.1"]
    wrong = [solution(exercise).replace("[sum(n", f"[{i} + sum(n") for i in (7, 9)]
    line = "    return [{}sum(numbers[start : start + size]) for start in starts]"
    change = f"-{line.format('')}\n+{line.format('9 + ')}"
    toy_root.write(
        "_solutions/e90_1/mutants.toml",
        f"[nine]\nteaches = 'Nine too many.'\nchange = '''\n{change}\n'''\n",
    )
    verdicts = []
    for number, text in enumerate(wrong):
        toy_root.write(f"{number}.py", text)
        verdicts.append(grade(exercise, toy_root.root / f"{number}.py"))
    assert verdicts[0].checks[0].trace == verdicts[1].checks[0].trace == (False,)
    assert [verdict.mutant for verdict in verdicts] == ["", "nine"]


def test_without_answers_no_misconception_is_looked_for(toy_root: ToyRoot) -> None:
    exercise = toy_root.manifest["e90.1"]
    mine = written(toy_root.root, exercise.mutants[0].source)
    for file in exercise.answers.iterdir():
        file.unlink()
    verdict = grade(exercise, mine)
    assert verdict.status == "fail"
    assert verdict.mutant == ""


# --- kind words for every bad input -----------------------------------------------------------

REFUSED = [
    ("def window_sums(numbers, size)\n    return []", "expected ':'"),
    ("import minillm\n", "build it yourself"),
]


@pytest.mark.parametrize(("source", "says"), REFUSED)
def test_the_guard_speaks_first(graded: Graded, source: str, says: str) -> None:
    verdict = graded(source)
    assert verdict.status == "refused"
    assert says in verdict.message
    assert statuses(verdict) == ["not run"] * 3


def test_a_missing_file_and_deleted_functions(toys: Toys, graded: Graded) -> None:
    verdict = grade(toys["e90.1"], Path("nowhere.py"))
    assert verdict.status == "missing"
    assert "No such file" in verdict.message
    verdict = graded(solution(toys["e90.1"]).replace("class Meter", "class Metre"))
    assert verdict.status == "missing"
    assert "Did you mean 'Metre'?" in verdict.message


RAISED = [  # first statement of window_sums; what the first check says
    ("return None", "expected [6], got None (is there a return?)."),
    ("return (n for n in numbers)", "got a generator (is a list(...) missing"),
    ("return map(str, numbers)", "got an iterator (is a list(...) missing?)"),
    ("return window_sums", "got a function (are its parentheses missing?)"),
    ("return numbers.copy", "got a function (are its parentheses missing?)"),
    ("return {1: 2}", "expected [6], got {1: 2}."),
    ("return 10**5000", "expected [6], got"),
    ("return ['x' * 10**7]", "(list)."),
    ("numbers[99]", "IndexError: list index out of range. There, numbers = [1, 2, 3], size = 3."),
    ("return window_sums(numbers, size)", "calls itself without end"),
    ("raise ValueError", "Your code raised ValueError."),
    ("raise KeyboardInterrupt", "Your code raised KeyboardInterrupt."),
    ("raise NotImplementedError('later')", "A part is still to be written."),
    ("assert size == 2, 'only two'", "Your code raised AssertionError: only two."),
    ("return undefined", "Your code raised NameError: name 'undefined' is not defined."),
]


@pytest.mark.parametrize(("statement", "says"), RAISED)
def test_what_a_function_does_wrong_is_explained(toys, graded, statement, says):
    verdict = graded(with_first(toys["e90.1"], statement))
    assert verdict.status == "fail"
    assert says in verdict.checks[0].message
    assert len(verdict.checks[0].message) < 400
    assert "Traceback" not in verdict.checks[0].message
    assert verdict.checks[2].status == "pass"
    if "Your code raised" in says:
        assert verdict.checks[0].where.startswith("line 6: ")


def test_a_changed_signature_is_explained(toys: Toys, graded: Graded) -> None:
    verdict = graded(
        solution(toys["e90.1"])
        .replace("numbers: list[int], size: int", "numbers")
        .replace("size", "2")
    )
    assert "cannot be called as the README says: window_sums() takes 1" in (
        verdict.checks[0].message
    )


LOADING = [
    ("undefined()", "could not be loaded (line 22: undefined()). Your code raised NameError"),
    (
        "while True: pass",
        "Used 1 s of processor time while your file was being loaded (line 22: while True: pass)",
    ),
    ("raise SystemExit", "ended the program while your file was being loaded (line 22"),
]


@pytest.mark.parametrize(("statement", "says"), LOADING)
def test_trouble_while_the_file_is_loaded(toys, graded, statement, says):
    verdict = graded(solution(toys["e90.1"]) + "\n" + statement)
    assert verdict.status in ("crashed", "timeout")
    assert says in verdict.message
    assert statuses(verdict) == ["not run"] * 3


def test_what_passed_before_an_end_counts(toys: Toys, graded: Graded) -> None:
    verdict = graded(with_first(toys["e90.1"], "if size == 2: exit()"))
    assert verdict.status == "crashed"
    assert "exit() ends everything" in verdict.message
    assert statuses(verdict) == ["pass", "error", "not run"]
    assert verdict.earned == 1


def test_memory_is_bounded(toys: Toys, graded: Graded) -> None:
    verdict = graded(with_first(toys["e90.1"], "x = bytearray(3 * 2**29)"))
    assert verdict.status == "crashed"
    assert "More than 1 GiB of memory was asked for in the check" in verdict.message
    assert "(line 6: x = bytearray(3 * 2**29))" in verdict.message


def test_memory_of_tensors_is_bounded(toys: Toys, graded: Graded) -> None:
    source = solution(toys["e91.1"]).replace(
        "    weights = ", "    torch.zeros(3 * 2**27)\n    weights = "
    )
    verdict = graded(source, "e91.1")
    assert verdict.status == "crashed"
    assert "More than 1 GiB of memory" in verdict.message


def test_printing_megabytes_does_no_harm(toys: Toys, graded: Graded) -> None:
    statement = "print('first'); [print('x' * 1000) for _ in range(5000)]"
    verdict = graded(with_first(toys["e90.1"], statement))
    assert verdict.status == "pass"
    assert verdict.printed.startswith("first\nxxx")
    assert len(verdict.printed.splitlines()) == 21
    assert "more" in verdict.printed.splitlines()[-1]


def test_a_method_by_another_name_is_refused_at_run_time(toys: Toys, graded: Graded) -> None:
    source = solution(toys["e91.1"]).replace(
        "    weights = ", "    return scores.softmax(-1)\n    weights = "
    )
    verdict = graded(source, "e91.1")
    assert statuses(verdict) == ["fail", "pass", "pass"]
    assert "build it yourself" in verdict.checks[0].message


# --- the process, without the guard in front of it ----------------------------------------------

HOSTILE = [
    ("import os; os._exit(0)", "without an exception (exit code 0)"),
    ("import os; os.kill(os.getpid(), 9)", "stopped by SIGKILL"),
    ("import ctypes; ctypes.string_at(0)", "numbers” (line 6: import ctypes"),
    ("import sys; sys.exit(0)", "exit() ends everything"),
    ("import os; os.closerange(0, 1000); os._exit(0)", "exit code 0"),
    (
        "import threading, time\n"
        "    threading.Thread(target=time.sleep, args=(99,)).start(); exit()",
        "exit() ends everything",
    ),
]


@pytest.mark.parametrize(("statement", "says"), HOSTILE)
def test_whatever_ends_the_process_is_reported(toys, unguarded, statement, says):
    verdict = unguarded(with_first(toys["e90.1"], statement))
    assert verdict.status == "crashed"
    assert says in verdict.message
    assert verdict.earned == 0
    assert unguarded(solution(toys["e90.1"])).status == "pass"  # the others still grade


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_processes_that_a_submission_leaves_behind_are_ended(toys: Toys, unguarded: Graded) -> None:
    leave = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    assert gone(int(unguarded(with_first(toys["e90.1"], leave)).printed.splitlines()[0]))


def test_a_submission_cannot_fill_the_disk(toys: Toys, unguarded: Graded) -> None:
    verdict = unguarded(with_first(toys["e90.1"], "open('x', 'wb').write(bytes(2**21))"))
    assert "File too large" in verdict.checks[0].message


REPORT = json.dumps({"event": "result", "check": "test_windows", "status": "pass", "seconds": 0})


@pytest.mark.parametrize(
    "channel", ["print({report!r}, flush=True)", "import sys; sys.__stdout__.write({report!r} * 9)"]
)
def test_a_forged_report_on_the_output_is_only_text(toys, unguarded, channel):
    forged = channel.format(report="\n" + REPORT + "\n") + "; return [0]"
    verdict = unguarded(with_first(toys["e90.1"], forged))
    assert statuses(verdict) == ["fail", "fail", "pass"]
    assert "test_windows" in verdict.printed


def test_a_forged_report_on_any_descriptor_does_not_pass(toys: Toys, unguarded: Graded) -> None:
    forged = (
        "import os, struct\n"
        f"    data = {REPORT.encode()!r}\n"
        "    for fd in range(100):\n"
        "        try: os.write(fd, struct.pack('!i', len(data)) + data)\n"
        "        except OSError: pass\n"
        "    return [0]"
    )
    verdict = unguarded(with_first(toys["e90.1"], forged))
    assert verdict.checks[1].status != "pass"


def test_the_process_has_no_input_no_secrets_and_a_folder_of_its_own(toys, monkeypatch):
    look = (
        "import os, sys\n    print(repr(sys.stdin.read()), os.listdir(), sep='\\n')\n"
        "    print(len(os.listdir('/proc/self/fd')), os.getcwd(), sep='\\n')\n"
        "    print('MY_TOKEN' in os.environ)"
    )
    monkeypatch.setenv("MY_TOKEN", "secret")
    printed = Grader(toys["e90.1"]).run(with_first(toys["e90.1"], look)).printed.splitlines()[:5]
    stdin, files, descriptors, folder, token = printed
    assert (stdin, files, token) == ("''", "[]", "False")
    assert int(descriptors) <= 7  # 0, 1, 2, the pipe, two logs, and this listing
    assert "minillm-grade-" in folder


def test_patching_the_checks_helpers_changes_nothing(toys: Toys, unguarded: Graded) -> None:
    patch = "import minillm_exercises.checking as c\nc.equal = c.check = lambda *a: None\n"
    verdict = unguarded(patch + solution(toys["e90.1"]).replace("sum(n", "7 + sum(n"))
    assert verdict.checks[0].status == "fail"


def test_a_new_process_per_submission_where_there_is_no_fork(toys: Toys, tmp_path: Path) -> None:
    exercise = toys["e90.1"]
    job = Job(solution(exercise), "mine.py", exercise.checks, tuple(NAMES), tmp_path)
    outcome = supervise(job, load_checks(exercise.checks), "spawn")
    results = [r["status"] for r in outcome["reports"] if r["event"] == "result"]
    assert results == ["pass"] * 3


ALONE = f"""
import os, signal, threading
from pathlib import Path
from minillm_exercises import runner
from minillm_exercises.grader import Grader
from minillm_exercises.manifest import load_manifest

exercise = load_manifest(Path({str(TOY)!r}))["e90.1"]
text = (exercise.answers / "solution.py").read_text("utf-8")
server = lambda: runner._living_server(()).process

def grade(slow=""):
    status = Grader(exercise).run(slow + text).status
    print(status, server().pid, flush=True)

grade()
os.kill(server().pid, signal.SIGINT)  # as Jupyter does: it interrupts a whole group
grade()
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    grade("import time; time.sleep(99)\\n")
except KeyboardInterrupt:
    grade()
killed = server()
killed.kill()
killed.wait()
grade()
if child := os.fork():
    os.waitpid(child, 0)
else:
    grade()
    os._exit(0)
grade()
os.kill(os.getpid(), signal.SIGKILL)
"""


def gone(process_id: int) -> bool:
    """Whether a process has ended, or does so in a while."""
    stat = Path(f"/proc/{process_id}/stat")
    for _ in range(3000):
        if not stat.exists() or stat.read_text("ascii").rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_the_process_that_grades_is_replaced_and_ends_with_the_one_that_started_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    assert [status for status, _ in said] == ["pass"] * 6
    idle, interrupted, answered, killed, fork, after = (int(process) for _, process in said)
    assert idle == interrupted != answered  # the answer to the interrupted job is nobody's
    assert answered != killed == after != fork  # a fork must not talk to the same process
    assert all(map(gone, {idle, answered, killed, fork}))


def test_checks_may_have_a_module_beside_them(toy_root: ToyRoot, tmp_path: Path) -> None:
    hidden = ToyRoot(tmp_path / "hidden")
    for root, one in ((toy_root, "6"), (hidden, "7")):
        root.edit("e90_windows/test_e90_1.py", "3), [6]", "3), [SIX]")
        root.edit(
            "e90_windows/test_e90_1.py", "from itertools", "from beside import SIX\nfrom itertools"
        )
        root.write("e90_windows/beside.py", f"SIX = {one}\n")
        exercise = root.manifest["e90.1"]
        verdict = grade(exercise, exercise.answers / "solution.py")
        assert verdict.status == ("pass" if one == "6" else "fail")


def test_checks_that_have_changed_are_loaded_anew(toy_root: ToyRoot) -> None:
    exercise = toy_root.manifest["e90.1"]
    assert grade(exercise, exercise.answers / "solution.py").status == "pass"
    toy_root.edit("e90_windows/test_e90_1.py", "3), [6]", "3), [7]")
    assert grade(exercise, exercise.answers / "solution.py").status == "fail"


@pytest.mark.parametrize(
    ("one", "other", "status", "same"),
    [(10**17 + 16, 1e17, "fail", True), ([1.0, 2], [1 + 1e-9, 2], "fail", True),
     (10**17 + 16, 10**17, "fail", False), (1.0, 1.0001, "fail", False), (1, True, "fail", False),
     ([3, 2], [2, 3], "pass", True), ([3, 2], [2, 3], "fail", False)]
)  # fmt: skip
def test_behaviour_is_the_same_within_rounding(one, other, status, same):
    seen = [CheckResult("test_x", "x", 1, status, trace=(each,)) for each in (one, other)]
    assert same_behaviour(*seen) is same


# --- the course's own mistakes -------------------------------------------------------------------


def test_a_check_that_compares_nothing_cannot_pass(toy_root: ToyRoot) -> None:
    toy_root.edit("e90_windows/test_e90_1.py", "    equal(impl", "    (lambda *a: a)(impl")
    exercise = toy_root.manifest["e90.1"]
    verdict = grade(exercise, exercise.answers / "solution.py")
    assert verdict.status == "fail"
    assert verdict.checks[0].message == VACUOUS


NO_CHECKS = [
    ("", "has no check, and grading nothing may not pass"),
    ("def helper(impl): pass\n", "has no check"),
    ("def test_x(impl): pass\n", "test_x needs @check(points=..., task='...')"),
    ("@check(points=len('x'), task='x')\ndef test_x(impl): pass\n", "with constants"),
    ("def test_x(impl)\n", "cannot be read"),
    ("import nonsense\n@check(1, 'x')\ndef test_x(impl): pass\n", "ModuleNotFoundError"),
    ("from minillm_exercises.checking import check\n@check(0, 'x')\ndef test_x(impl): pass\n",
     "points >= 1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), NO_CHECKS)
def test_a_broken_grader_is_an_error_and_no_pass(toy_root: ToyRoot, text: str, says: str) -> None:
    toy_root.write("e90_windows/test_e90_1.py", text)
    exercise = toy_root.manifest["e90.1"]
    with pytest.raises(ExerciseError, match="e90") as caught:
        grade(exercise, exercise.answers / "solution.py")
    assert says in str(caught.value)


def test_the_checks_are_listed_without_running_them(toys: Toys) -> None:
    checks = list_checks(toys["e90.1"])
    assert [check.name for check in checks] == NAMES
    assert [check.points for check in checks] == [1, 2, 1]
    assert checks[2].task == "the largest so far"
