"""How long a submission may compute, and how long it may wait: what ends it, and in which words."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minillm_exercises import server
from minillm_exercises.child import Job
from minillm_exercises.grader import Grader
from minillm_exercises.limits import Limits
from minillm_exercises.manifest import Exercise
from minillm_exercises.server import load_checks, supervise
from minillm_exercises.wording import timeout_sentence
from tests.course.submissions import Graded, statuses, with_first

Toys = dict[str, Exercise]
IMPATIENT = Limits(cpu=600.0, wall=1.0)  # for what waits without computing
COMPUTE = (
    "import time; t = time.thread_time()\n    while size == 3 and time.thread_time() < t + 0.8: 1"
)


@pytest.fixture(scope="module")
def grader(toys: Toys) -> Grader:
    """A grader of e90.1 with which an endless loop ends soon."""
    return Grader(toys["e90.1"], limits=Limits(cpu=1.0, wall=600.0))


@pytest.fixture
def graded(grader: Grader) -> Graded:
    """Run a text as a submission of e90.1."""
    return grader.run


def test_an_endless_loop_is_named_by_its_line(toys: Toys, graded: Graded) -> None:
    verdict = graded(with_first(toys["e90.1"], "while size: size += 1"))
    assert verdict.status == "timeout"
    assert "Used 1 s of processor time in the check" in verdict.message
    assert "(line 6: while size: size += 1). Does the loop end?" in verdict.message
    assert "There, numbers = [1, 2, 3], size = " in verdict.message
    assert statuses(verdict) == ["error", "not run", "not run"]


@pytest.mark.slow
def test_a_loop_that_catches_everything_ends_too(toys: Toys, graded: Graded) -> None:
    loop = "while True:\n        try: size += 1\n        except: pass"
    assert graded(with_first(toys["e90.1"], loop)).status == "timeout"


@pytest.mark.slow
def test_a_repr_that_never_ends_does_not_hold_the_verdict_up(toys: Toys, graded: Graded) -> None:
    odd = "class Odd:\n    def __repr__(self):\n        while True: pass\n\n\n"
    source = odd + with_first(toys["e90.1"], "x = [Odd()]\n    while True: pass")
    verdict = graded(source)
    assert verdict.status == "timeout"
    assert "(line 12: while True: pass). Does the loop end? The checks" in verdict.message


@pytest.mark.slow
def test_one_operation_without_end_is_ended_and_named(toys, graded):
    """It never comes back from C, so no signal handler of Python's can run."""
    verdict = graded(with_first(toys["e90.1"], "sum(range(10**12))"))
    assert verdict.status == "timeout"
    assert verdict.message.startswith("Used 1 s of processor time in the check ")
    assert "(line 6: sum(range(10**12))). Is this one operation very large" in verdict.message
    assert statuses(verdict) == ["error", "not run", "not run"]


@pytest.mark.slow
def test_the_processor_time_of_threads_counts(toys: Toys, graded: Graded) -> None:
    spin = "import threading; threading.Thread(target=any, args=(iter(int, 1),)).start()"
    verdict = graded(with_first(toys["e90.1"], f"{spin}\n    threading.Event().wait()"))
    assert verdict.status == "timeout"
    assert verdict.message.startswith("Used 1 s of processor time in the check ")


WAITING = ["import time; time.sleep(600)", "import threading; threading.Event().wait()"]


@pytest.mark.parametrize("statement", WAITING)
def test_waiting_without_computing_is_ended(toys: Toys, graded: Graded, statement: str) -> None:
    verdict = graded(with_first(toys["e90.1"], statement), limits=IMPATIENT)
    assert verdict.status == "timeout"
    assert verdict.message.startswith("Waited 1 s without computing in the check ")
    assert f"(line 6: {statement}). For what does it wait?" in verdict.message


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the system tells no processor time of others")
def test_computing_slowly_is_not_waiting(toys: Toys, graded: Graded) -> None:
    """A check may compute for longer than it may wait."""
    slow = with_first(toys["e90.1"], COMPUTE)
    assert graded(slow, limits=Limits(cpu=60.0, wall=0.4)).status == "pass"


def test_waiting_costs_no_processor_time(toys: Toys, graded: Graded) -> None:
    late = with_first(toys["e90.1"], "if size == 3: import time; time.sleep(1)")
    assert graded(late, limits=Limits(cpu=0.5)).status == "pass"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGXCPU"), reason="a system without RLIMIT_CPU")
def test_each_check_has_the_whole_processor_time() -> None:
    """The limit of a process counts from its beginning, so that it is moved with every check."""
    code = """
import resource, time
from minillm_exercises.limits import LATER, Limits, set_alarm

for used in (0, 1.5):
    while time.process_time() < used: pass
    set_alarm(Limits(cpu=7))
    print(resource.getrlimit(resource.RLIMIT_CPU)[0] - 7 - LATER - time.process_time())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(-0.5 < float(more) <= 1 for more in done.stdout.split()), done.stdout


@pytest.mark.parametrize(
    ("missing", "says"), [("setitimer", "No answer within 1 s"), ("clock", "Waited 1 s without")]
)
def test_systems_that_count_no_processor_time_have_the_clock(
    toys: Toys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, says: str
) -> None:
    """Windows has no alarm; outside of Linux the time of another process is not told."""
    monkeypatch.setattr(server, "processor_time", lambda process_id: None)
    if missing == "setitimer":
        monkeypatch.delattr(signal, "setitimer")
    exercise = toys["e90.1"]
    source = with_first(exercise, "while True: pass")
    job = Job(source, "mine.py", exercise.checks, ("test_one_window",), tmp_path, limits=IMPATIENT)
    (last,) = supervise(job, load_checks(exercise.checks))["reports"][-1:]
    assert timeout_sentence(last, "", "here", IMPATIENT).startswith(says)
