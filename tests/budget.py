"""CPU seconds of the tests: `make test` fails when a folder or a test needs more than it may.

CPU seconds, with those of child processes, are nearly the same on a busy machine. They are divided
by how much slower this processor is than the one of the budgets.
"""

import os
import time
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pytest

# CPU seconds of each folder's tests in `make test`: half as much again as they take. Whoever needs
# more moves a matrix to `slow`, makes a test smaller, or raises the number and says why.
FOLDERS = {
    "api": 8, "cache": 3, "cli": 12, "clients": 2, "course": 72, "engine": 50, "execution": 14,
    "external": 2, "interpreted": 130, "kernels": 20, "lab": 55, "layers": 3, "matrix": 75,
    "models": 55, "ops": 50, "parallel": 42, "plan": 4, "quantization": 55, "sampling": 10,
    "scheduling": 33, "serving": 65, "speculative": 95, "structured": 5, "tests": 20, "text": 12,
    "trace": 13,
}  # fmt: skip
LONGEST = 1.0  # seconds of one test; what needs more is marked slow
# Files where one test opens what all share, or cannot be divided; and its seconds.
LONGER = {
    "tests/test_floors.py": 2,  # starts a process
    "tests/test_style.py": 2,
    "tests/course/test_strangers.py": 3,
    "tests/course/test_verify_exercises.py": 5,  # an exercise, its first known mistakes
    "tests/kernels/interpreted/test_triton_engine.py": 3,
    "tests/kernels/interpreted/test_triton_mla.py": 3,
    "tests/kernels/test_compiled.py": 3,
    "tests/lab/gpu/test_gpu_command.py": 4,  # starts a worker
    "tests/lab/gpu/test_gpu_stages.py": 4,  # starts two engines
    "tests/models/test_packing.py": 2,
    "tests/ops/test_c_compilers.py": 2,  # starts compilers
    "tests/ops/test_c_sampling.py": 2,
    "tests/parallel/test_nodes.py": 4,  # starts four ranks
    "tests/parallel/test_processes.py": 4,  # starts two engines
    "tests/quantization/test_loading_memory.py": 3,
    "tests/scheduling/test_histories.py": 4,
    "tests/serving/test_http_failures.py": 3,  # starts a server
    "tests/matrix/test_cells.py": 5,  # the first cell of a model has what it answers alone
}
TOLERANCE = 2.0  # for a test, whose first call may import something
# As they are before a test replaces them; Windows has no sysconf.
LIST, OPEN, TIMES, SYSCONF = os.listdir, open, os.times, getattr(os, "sysconf", None)
REFERENCE = 0.0173  # CPU seconds of `some_work` where the budgets were measured


def cpu_seconds() -> float:
    """User and system seconds of this process and its descendants, living or waited for."""
    return sum(TIMES()[:4]) + sum(map(seconds_of, descendants(os.getpid())))


def descendants(process: int) -> Iterator[int]:
    """The living ones; none on a system without /proc."""
    try:
        threads = LIST(f"/proc/{process}/task")
    except OSError:
        return
    for thread in threads:
        for child in map(int, text_of(f"/proc/{process}/task/{thread}/children").split()):
            yield child
            yield from descendants(child)


def seconds_of(process: int) -> float:
    """Its user and system seconds, and those of its children that it has waited for."""
    fields = text_of(f"/proc/{process}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / SYSCONF("SC_CLK_TCK")


def text_of(path: str) -> str:
    """A file of /proc; empty when its process has ended."""
    try:
        with OPEN(path) as file:
            return file.read()
    except OSError:
        return ""


def some_work() -> float:
    """CPU seconds that a little Python takes."""
    start = time.process_time()
    sum(i * i % 7 for i in range(300_000))
    return time.process_time() - start


def folder_of(nodeid: str) -> str:
    """The part of tests/ whose budget a test is charged to."""
    folders = nodeid.split("::")[0].split("/")[1:-1]
    return folders[-1] if "interpreted" in folders else (folders or ["tests"])[0]


def faults(tests: dict[str, float], calls: dict[str, float], slower: float) -> list[str]:
    """What is over its budget on a processor that is `slower` times as slow as the budgets': CPU
    seconds of whole tests, and of their calls without set-up, by name."""
    found, folders = [], Counter[str]()
    for test, seconds in tests.items():
        folders[folder_of(test)] += seconds
    for folder, seconds in folders.items():
        allowed = FOLDERS.get(folder, 0.0) * slower
        if seconds > allowed:
            mine = sorted((s, test) for test, s in tests.items() if folder_of(test) == folder)
            slowest = "".join(f"\n    {s:5.1f} s  {test}" for s, test in reversed(mine[-5:]))
            found.append(
                f"{folder}: {seconds:.0f} CPU seconds, {allowed:.0f} allowed by FOLDERS in "
                f"tests/budget.py. Mark tests slow or make them smaller. The slowest:{slowest}"
            )
    for test, seconds in calls.items():
        most = LONGER.get(test.split("::")[0], LONGEST)
        if seconds > most * TOLERANCE * slower:
            found.append(f"{test}: {seconds:.1f} CPU seconds; above {most:g} it must be slow")
    return found


class Budget:
    """The plugin: worker processes measure, and the process that started them adds up."""

    def __init__(self) -> None:
        self.slower = 1.0
        self.tests, self.calls = Counter[str](), Counter[str]()
        self.faults: list[str] = []
        self._last = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._last = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        now = cpu_seconds()
        report.user_properties.append(("cpu", max(0.0, now - self._last)))
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = dict(report.user_properties).get("cpu", 0.0)
        self.tests[report.nodeid] += seconds
        if report.when == "call":
            self.calls[report.nodeid] = seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):  # it has a part of the tests only
            return
        self.slower = max(1.0, min(some_work() for _ in range(9)) / REFERENCE)
        self.faults = faults(self.tests, self.calls, self.slower)
        if self.faults and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders = Counter[str]()
        for test, seconds in self.tests.items():
            folders[folder_of(test)] += seconds
        spent = ", ".join(f"{name} {seconds:.0f}" for name, seconds in folders.most_common())
        terminalreporter.section("CPU seconds by folder")
        terminalreporter.line(f"{spent} (allowed: {self.slower:.2f} times tests/budget.py)")
        for fault in self.faults:
            terminalreporter.line(f"OVER BUDGET {fault}", red=True)
