"""Comparisons are fair and count rightly: with made-up engines, on a made-up clock, alone and
beside busy processes, of which no failure leaves one behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from minillm.cli.terminal import Terminal
from minillm.lab.benchmarks import beside, compare, contest, others
from minillm.lab.benchmarks.beside import busy_processes, fair_share
from minillm.lab.benchmarks.ceiling import SUMS, Ceiling
from minillm.lab.benchmarks.compare import Work, lognormal_lengths
from minillm.lab.benchmarks.compare_table import show
from minillm.lab.benchmarks.contest import Case, Contest, Run, decode_run, prompts_of
from minillm.lab.benchmarks.engine_process import EngineFailedError
from minillm.lab.benchmarks.others import Watch, busy_ticks, group_ticks
from minillm.lab.benchmarks.peers.protocol import Timeline
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


# ---- counting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "times", "steps", "run"),
    [
        # One step less than tokens, after the prompts; a prefill has none.
        (4, [100, 103, 103.5, 104, 105], ["11"] * 4, Run(3.0, 2.0, 6, 3)),
        (1, [0, 2], ["11"], Run(2.0, 0.0, 0, 0)),
        # Prompts in two steps: the first sequence gets ahead, and is complete a step earlier.
        (4, [0, 1, 2, 2.5, 3, 9], ["1.", "11", "11", "11", ".1"], Run(2.0, 1.0, 4, 2)),
        # A step that brings nothing is no step; a sequence begins with its first token.
        (2, [0, 1, 2, 4], ["..", "11", "11"], Run(2.0, 2.0, 2, 1)),
        (2, [0, 1, 2, 3], ["10", "11", ".1"], "no step decodes all 2"),
        (2, [0, 1, 2, 3, 4], ["1.", "1.", ".1", ".1"], "no step decodes all 2"),
        (4, [0, 1], ["11"], "returned 2 tokens instead of 2 x 4"),
    ],
)
def test_decoding_is_what_all_sequences_do(length, times, steps, run):
    """A step is a character per sequence: its new tokens, or a dot."""
    clock = iter(times)
    line = Timeline([length] * 2, lambda: float(next(clock)))
    for step in steps:
        line.step((place, int(new)) for place, new in enumerate(step) if new != ".")
    if isinstance(run, str):
        with pytest.raises(EngineFailedError, match=run):
            decode_run(line.rows, Case(2, 10, length))
    else:
        assert line.done
        assert decode_run(line.rows, Case(2, 10, length)) == run


def test_too_many_tokens_are_noticed() -> None:
    with pytest.raises(RuntimeError, match="more tokens than requested"):
        Timeline([2]).step([(0, 3)])


def test_every_engine_gets_the_same_prompts_and_every_repeat_others() -> None:
    case = Case(3, 7, 2)
    prompts = prompts_of(case, 50, 1)
    assert prompts == prompts_of(case, 50, 1) != prompts_of(case, 50, 2)
    assert [len(ids) for ids in prompts] == [7, 7, 7]
    assert all(0 <= token < 49 for ids in prompts for token in ids)


def test_lengths_are_seeded_and_within_their_limits() -> None:
    prompts, lengths = made = lognormal_lengths(500, 3, 300, 120)
    assert made == lognormal_lengths(500, 3, 300, 120) != lognormal_lengths(500, 4, 300, 120)
    assert 8 <= min(prompts) < 28 < 280 < max(prompts) <= 300
    assert 8 <= min(lengths) < 28 <= max(lengths) <= 120


# ---- in turn ----------------------------------------------------------------------------------


class FakeEngine:
    """Answers as it is told: a step takes `step` seconds alone, and 4 times as long beside busy
    processes."""

    def __init__(self, name: str, log: list[tuple[str, str]], step: float = 0.5, load: Any = (0,)):
        self.name, self.group, self.step = name, 0, step
        self._log, self._load, self._asked = log, load, count()
        self.fails_at = -1

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Facts, or the rows of a perfect run, or the facts of an offline run."""
        self._log.append((self.name, request["do"]))
        if next(self._asked) == self.fails_at:
            raise EngineFailedError(f"{self.name} fell over.")
        if request["do"] == "open":
            return {"version": "1", "weights": "w", "kv_cache": "k", "seconds": 1.0}
        slower, new = 4 if self._load[0] else 1, request["new_tokens"]
        if request["do"] == "offline":
            return {"seconds": 2.0 * slower, "tokens": sum(new)}
        batch, step = len(request["prompts"]), self.step * slower
        return [(1 + step * n, batch, batch, batch * (n == new - 1)) for n in range(new)]

    def close(self) -> None:
        """Nothing is left."""
        self._log.append((self.name, "close"))


@pytest.fixture
def log() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def three(log: list[tuple[str, str]]) -> list[FakeEngine]:
    return [FakeEngine(name, log) for name in "abc"]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of busy processes that are running, without starting any."""
    running = [0]

    @contextmanager
    def busy(number: int) -> Iterator[tuple[int, ...]]:
        running[0] = number
        yield tuple(range(number))
        running[0] = 0

    monkeypatch.setattr(contest, "busy_processes", busy)
    return running


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[float]:
    """What other programs use during each run, from the front; 2% when the list is empty."""
    shares: list[float] = []

    @contextmanager
    def watching(groups: object, busy: Sequence[int]) -> Iterator[Watch]:
        yield Watch(shares.pop(0) if shares else 0.02, 0.25 * len(busy))

    monkeypatch.setattr(contest, "watching", watching)
    return shares


def test_engines_take_turns_and_every_repeat_begins_with_another(three, log):
    three[2].step = 2.0
    held = Contest(three, 100)
    held.open({})
    scores = held.play(Case(2, 8, 5), repeats=3)
    order = "".join(name for name, what in log if what == "steps")
    assert order == "abc" + "bca" + "cab" + "abc"  # the warm-up, and three repeats
    assert [(score.engine, len(score.runs)) for score in scores] == [("a", 3), ("b", 3), ("c", 3)]
    rates = [score.runs[0].tokens / score.runs[0].decode_seconds for score in scores]
    assert rates == [4.0, 4.0, 1.0]


def test_an_engine_that_fails_is_out_and_the_others_go_on(three, log):
    three[0].fails_at, three[1].fails_at = 0, 2  # one cannot load, one fails after its warm-up
    held = Contest(three, 100)
    held.open({})
    assert (list(held.failed), list(held.facts)) == (["a"], ["b", "c"])
    assert [(one.engine, len(one.runs)) for one in held.play(Case(1, 8, 2), 2)] == [("c", 2)]
    assert held.failed == {"a": "a fell over.", "b": "b fell over."}
    assert log.count(("b", "close")) == 1
    three[2].fails_at = 6
    assert held.play(Case(2, 8, 2), 3, extra=1) == []


@pytest.mark.parametrize(
    "answer", [None, 7, [], [[1.0]], [["a", "b", "c", "d"]], [(1.0, 8, 0, 0)], [(1.0, 1, 1, 0)],
               {"seconds": 1.0, "tokens": 3}]
)  # fmt: skip
def test_an_answer_without_sense_is_a_failure_of_that_engine(three, monkeypatch, answer):
    held = Contest(three, 100)
    monkeypatch.setattr(three[0], "ask", lambda request: answer)
    assert [score.engine for score in held.play(Case(2, 8, 4), 1)] == ["b", "c"]
    monkeypatch.setattr(three[1], "ask", lambda request: answer)
    (score,) = held.play_offline([[1], [2, 3]], [4, 5], 2)
    assert (score.engine, len(score.runs)) == ("c", 2)
    assert all(held.failed[name].startswith(name) for name in "ab")


def test_disturbed_runs_are_made_again(three: list[FakeEngine], quiet: list[float]) -> None:
    """Of three repeats the first is disturbed for b; a fourth is made for all, and no fifth."""
    quiet[:] = [0.0] * 3 + [0.5] + [0.0] * 11  # the warm-up; then b comes first
    scores = {one.engine: one for one in Contest(three, 100).play(Case(1, 8, 2), 3, extra=3)}
    assert [run.others for run in scores["b"].runs] == [0.0, 0.0, 0.0]
    assert all(len(score.runs) == 3 for score in scores.values())
    assert quiet == []


# ---- beside busy processes --------------------------------------------------------------------


def test_every_repeat_runs_alone_and_beside(load: list[int]) -> None:
    said: list[str] = []
    held = Contest([FakeEngine(name, [], load=load) for name in "ab"], 100, said.append, beside=3)
    scores = held.play(Case(2, 8, 4), repeats=2)
    assert [(one.engine, one.beside, len(one.runs)) for one in scores] == [
        ("a", 0, 2), ("b", 0, 2), ("a", 3, 2), ("b", 3, 2),
    ]  # fmt: skip
    assert [run.busy for one in scores for run in one.runs] == [0.0] * 4 + [0.75] * 4
    rounds = [" ".join(line.split()[3:]) for line in said]
    assert rounds[:2] == ["warm-up of a", "warm-up of b"]
    assert rounds[2:6] == ["run 1 of b", "run 1 of a", "run 1 of b, beside 3",
                           "run 1 of a, beside 3"]  # fmt: skip
    assert load == [0]


@pytest.mark.parametrize("what", ["decode", "prefill", "offline"])
def test_the_table_and_the_json_have_the_speed_over_the_idle_speed(what, load, monkeypatch, capsys):
    monkeypatch.setattr(beside.machine, "cpu_count", lambda: 2)
    ceiling = Ceiling({SUMS: 1e10}, 1e12, 1e11)
    monkeypatch.setattr(compare, "measure_ceiling", lambda *asked: ceiling)
    work = Work(what, "m", "m", preset("smollm2-135m"), (Case(2, 8, 5),), 2, ("minillm", "vllm"),
                2, "bfloat16", requests=3, beside=2)  # fmt: skip
    found = compare.measure(work, start=lambda name, *rest: FakeEngine(name, [], load=load))
    told = found["beside"]
    assert (told["processes"], told["processors"], told["fair_share"]) == (2, 2, 0.5)
    assert [one["engine"] for one in found["results"]] == ["minillm", "vllm"]
    ratio = 1.0 if what == "prefill" else 0.25  # the prompts of the fake engine take one second
    for one, idle in zip(told["results"], found["results"], strict=True):
        assert one["over_idle"] == pytest.approx(ratio)
        assert one["idle_tokens_per_second"] == idle["tokens_per_second"]["median"]
        assert (one["busy"], idle["busy"]) == (0.5, 0.0)
    assert "beside 2: 1.00 times the best peer, vllm." in found["statement"][-1]
    show(found, Terminal())
    shown = " ".join(capsys.readouterr().out.split())
    assert "engine idle tok/s beside 2 over idle fair busy others" in shown
    assert f"{ratio:.0%} 50% 50% 2%" in shown
    assert "The fair share is 50% of the idle speed: 2 threads of an engine and 2 busy" in shown


def test_a_fair_share_is_that_of_tasks_that_take_turns() -> None:
    """By hand, of threads, busy processes and processors."""
    due = {(2, 1, 2): 2 / 3, (1, 1, 2): 1, (4, 2, 2): 2 / 3, (8, 3, 16): 1, (2, 16, 2): 1 / 9}
    assert {each: fair_share(*each) for each in due} == pytest.approx(due)


def runs(pid: int) -> bool:
    """Whether a process exists and has not ended; the parent may not have collected it yet."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True)
    return done.stdout.strip()[:1] not in (b"", b"Z")


def end(*pids: int) -> bool:
    """Whether processes end within ten seconds."""
    for _ in range(500):
        if not any(map(runs, pids)):
            return True
        time.sleep(0.02)
    return False


@posix
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
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
    assert end(*pids)


@posix
def test_one_that_cannot_start_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first = beside.start()
    monkeypatch.setattr(beside, "start", [first].pop)  # there is no second one
    with pytest.raises(IndexError), busy_processes(2):
        raise AssertionError("the block must not run")
    assert not runs(first.pid)


# ---- what others use --------------------------------------------------------------------------


def write_proc(folder: Path, used: Mapping[int, int]) -> None:
    """A made-up /proc: ticks of processes, whose names look like the end of a name and which are
    their own groups."""
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(
        f"cpu  {sum(used.values()) - 1} 0 1 400 500 0 0 0 900 900\ncpu0 1\n"
    )
    for pid, ticks in used.items():
        (folder / str(pid)).mkdir(exist_ok=True)
        text = f"{pid} (a) b) S 1 {pid} {'0 ' * 8} {max(ticks - 1, 0)} {min(ticks, 1)}"
        (folder / str(pid) / "stat").write_text(text)


def test_ticks_are_those_of_the_groups_and_the_rest_is_others(tmp_path, monkeypatch):
    """Two seconds of two processors: 100 ticks of an engine, 200 of busy processes, 40 of another
    program. What is shorter than a few ticks is not counted."""
    now = [0.0]
    monkeypatch.setattr(others, "perf_counter", lambda: now[0])
    monkeypatch.setattr(others.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(others.os, "sysconf", lambda name: 100)
    for seconds, share, busy in ((2.0, 0.1, 0.5), (0.05, 0.0, 0.0), (0.15, 1.0, 1.0)):
        write_proc(tmp_path, {11: 0, 12: 0, 13: 1})
        with others.watching([11], tmp_path, busy=[12]) as watch:
            now[0] += seconds
            write_proc(tmp_path, {11: 100, 12: 200, 13: 41})
        assert (watch.share, watch.busy) == (share, busy)
    assert busy_ticks(tmp_path) == 341  # neither idle nor waiting for a disk
    assert group_ticks(frozenset({11, 13}), tmp_path) == 141
    assert busy_ticks(tmp_path / "nowhere") == 0
