"""Busy processes: they keep processors busy during a run, and no failure leaves one behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from minillm.cli.terminal import Terminal
from minillm.lab.benchmarks import beside, compare, contest, others
from minillm.lab.benchmarks.beside import BusyProcessError, busy_processes, fair_share
from minillm.lab.benchmarks.ceiling import SUMS, Ceiling
from minillm.lab.benchmarks.compare import Work
from minillm.lab.benchmarks.compare_table import show
from minillm.lab.benchmarks.contest import Case, Contest
from minillm.lab.benchmarks.others import Watch
from minillm.models.presets import preset

ROOT = Path(__file__).resolve().parents[3]
HOLDER = """
import signal, sys, time
from minillm.lab.benchmarks.beside import busy_processes
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
with busy_processes(2) as pids:
    print(*pids, flush=True)
    time.sleep(600)
"""
posix = pytest.mark.skipif(os.name != "posix", reason="needs signals and process groups")


def runs(pid: int) -> bool:
    """Whether a process exists and has not ended; the parent may not have collected it yet."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True)
    return done.stdout.strip()[:1] not in (b"", b"Z")


def ended(pids: tuple[int, ...]) -> bool:
    """Whether all processes end within ten seconds."""
    for _ in range(500):
        if not any(map(runs, pids)):
            return True
        time.sleep(0.02)
    return False


# ---- processes --------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("error", [None, KeyboardInterrupt, RuntimeError])
def test_they_run_during_the_block_and_end_with_it(error: type[BaseException] | None) -> None:
    pids: list[int] = []
    with pytest.raises(error) if error else nullcontext(), busy_processes(2) as groups:
        pids += groups
        assert all(map(runs, pids))
        if error is not None:
            raise error
    assert len(set(pids)) == 2
    assert not any(map(runs, pids))


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_they_end_when_their_parent_does(number: signal.Signals) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, cwd=ROOT)  # fmt: skip
    assert holder.stdout is not None
    pids = tuple(map(int, holder.stdout.readline().split()))
    assert len(pids) == 2
    assert all(map(runs, pids))
    holder.send_signal(number)
    holder.communicate()
    assert ended(pids)


@posix
def test_one_that_cannot_start_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], beside.start

    def second_fails() -> "subprocess.Popen[bytes]":
        if started:
            raise BusyProcessError("A busy process cannot be started: no memory.")
        started.append(start())
        return started[0]

    monkeypatch.setattr(beside, "start", second_fails)
    with pytest.raises(BusyProcessError, match="no memory"), busy_processes(2):
        raise AssertionError("the block must not run")
    assert not runs(started[0].pid)


@posix
def test_they_use_a_processor_by_the_count_of_the_kernel() -> None:
    if not others.busy_ticks(others.PROC):
        pytest.skip("the kernel reports no processor time")
    with busy_processes(1) as (pid,), others.watching([], busy=[pid]) as watch:
        start, before = time.perf_counter(), ticks(pid)
        while (used := ticks(pid) - before) < 20 and time.perf_counter() - start < 20:
            time.sleep(0.05)
        taken = time.perf_counter() - start
    counted = watch.busy * taken * (os.cpu_count() or 1) * os.sysconf("SC_CLK_TCK")
    assert used >= 20
    assert counted == pytest.approx(used, rel=0.5)


def ticks(pid: int) -> int:
    """User and system time of a process, in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_their_time_is_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two seconds of two processors: 100 ticks of an engine, 200 of busy processes, 40 of
    another program."""
    now = [0.0]
    monkeypatch.setattr(others, "perf_counter", lambda: now[0])
    monkeypatch.setattr(others.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(others.os, "sysconf", lambda name: 100)

    def write(used: Mapping[int, int]) -> None:
        (tmp_path / "stat").write_text(f"cpu  {sum(used.values())} 0 0 0 0 0 0 0\n")
        for pid, count in used.items():
            (tmp_path / str(pid)).mkdir(exist_ok=True)
            text = f"{pid} (python) S 1 {pid} {'0 ' * 8} {count} 0"
            (tmp_path / str(pid) / "stat").write_text(text)

    write({11: 0, 12: 0, 13: 0})
    with others.watching([11], tmp_path, busy=[12]) as watch:
        now[0] += 2
        write({11: 100, 12: 200, 13: 40})
    assert (watch.share, watch.busy) == (0.1, 0.5)


@pytest.mark.parametrize(
    ("threads", "count", "processors"), [(2, 2, 2), (2, 1, 2), (1, 1, 2), (1, 2, 2), (4, 2, 2),
                                         (8, 3, 16), (16, 4, 16), (2, 16, 2)]
)  # fmt: skip
def test_a_fair_share_is_that_of_a_round_robin(threads: int, count: int, processors: int) -> None:
    def slices(busy: int) -> float:
        """Processors that the engine has on average, if all tasks take turns."""
        tasks, rounds = threads + busy, 60
        at_once = min(processors, tasks)
        turns = [(step * at_once + each) % tasks for step in range(rounds * tasks)
                 for each in range(at_once)]  # fmt: skip
        return sum(task < threads for task in turns) / (rounds * tasks)

    assert fair_share(threads, count, processors) == pytest.approx(slices(count) / slices(0))


# ---- in a comparison --------------------------------------------------------------------------


class FakeEngine:
    """An engine whose step takes 1 ms alone, and 4 ms beside busy processes."""

    def __init__(self, name: str, load: list[int]):
        self.name, self.group, self._load = name, 0, load

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Facts, or the rows of a run, or the facts of an offline run."""
        if request["do"] == "open":
            return {"version": "1", "weights": "w", "kv_cache": "k", "seconds": 1.0}
        slower = 4 if self._load[0] else 1
        if request["do"] == "offline":
            return {"seconds": 2.0 * slower, "tokens": sum(request["new_tokens"])}
        batch, new = len(request["prompts"]), request["new_tokens"]
        step = slower / 1000
        return [(1 + step * n, batch, batch, batch * (n + 1 == new)) for n in range(new)]

    def pause(self) -> None:
        """Nothing runs."""

    resume = close = pause


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of busy processes that are running, without starting any."""
    running = [0]

    @contextmanager
    def busy(count: int) -> Iterator[tuple[int, ...]]:
        running[0] = count
        yield tuple(range(count))
        running[0] = 0

    @contextmanager
    def watching(groups: list[int], busy: tuple[int, ...]) -> Iterator[Watch]:
        yield Watch(0.02, 0.25 * len(busy))

    monkeypatch.setattr(contest, "busy_processes", busy)
    monkeypatch.setattr(contest, "watching", watching)
    monkeypatch.setattr(
        compare, "measure_ceiling", lambda *asked: Ceiling({SUMS: 1e10}, 1e12, 1e11)
    )
    return running


def test_every_repeat_runs_alone_and_beside(load: list[int]) -> None:
    said: list[str] = []
    held = Contest([FakeEngine(name, load) for name in "ab"], 100, said.append, beside=3)
    scores = held.play(Case(2, 8, 4), repeats=2)
    assert [(one.engine, one.beside, len(one.runs)) for one in scores] == [
        ("a", 0, 2), ("b", 0, 2), ("a", 3, 2), ("b", 3, 2),
    ]  # fmt: skip
    assert [run.busy for one in scores for run in one.runs] == [0.0] * 4 + [0.75] * 4
    rounds = [" ".join(line.split()[3:]) for line in said]
    assert rounds[:2] == ["warm-up of a", "warm-up of b"]
    assert rounds[2:6] == [
        "run 1 of b",
        "run 1 of a",
        "run 1 of b, beside 3",
        "run 1 of a, beside 3",
    ]
    assert load == [0]


def work_of(what: str) -> Work:
    """A comparison beside two busy processes."""
    case = Case(2, 8, 5)
    return Work(what, "m", "m", preset("smollm2-135m"), (case,), 2, ("minillm", "vllm"), 2,
                "bfloat16", requests=3, beside=2)  # fmt: skip


@pytest.mark.parametrize("what", ["decode", "prefill", "offline"])
def test_the_table_and_the_json_have_the_speed_over_the_idle_speed(
    what: str, load: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(beside.machine, "cpu_count", lambda: 2)
    found = compare.measure(work_of(what), start=lambda name, *rest: FakeEngine(name, load))
    told = found["beside"]
    assert (told["processes"], told["processors"], told["fair_share"]) == (2, 2, 0.5)
    assert [one["engine"] for one in found["results"]] == ["minillm", "vllm"]
    ratio = 1.0 if what == "prefill" else 0.25  # the prompts of the fake engine take one second
    for one, idle in zip(told["results"], found["results"], strict=True):
        assert one["over_idle"] == pytest.approx(ratio)
        assert one["idle_tokens_per_second"] == idle["tokens_per_second"]["median"]
        assert (one["busy"], idle["busy"]) == (0.5, 0.0)
    beside_line = found["statement"][-1]
    assert "beside 2: 1.00 times the best peer, vllm." in beside_line
    show(found, Terminal())
    shown = " ".join(capsys.readouterr().out.split())
    assert "engine idle tok/s beside 2 over idle fair busy others" in shown
    assert f"{ratio:.0%} 50% 50% 2%" in shown
    assert "The fair share is 50% of the idle speed: 2 threads of an engine and 2 busy" in shown
