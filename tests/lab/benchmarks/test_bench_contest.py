"""Comparisons are fair and count rightly: with made-up engines, on a made-up clock."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from minillm.lab.benchmarks import contest as contest_module
from minillm.lab.benchmarks import others
from minillm.lab.benchmarks.contest import (
    Case,
    Contest,
    Run,
    calmest,
    decode_run,
    prompts_of,
    spread,
)
from minillm.lab.benchmarks.engine_process import EngineFailedError
from minillm.lab.benchmarks.lengths import LENGTHS, lognormal_lengths
from minillm.lab.benchmarks.others import Watch, busy_ticks, own_ticks
from minillm.lab.benchmarks.peers.protocol import Timeline


def timeline(lengths: Sequence[int], times: Sequence[float]) -> Timeline:
    """A timeline whose clock shows `times`, the first of them at its start."""
    clock = iter(times)
    return Timeline(lengths, lambda: next(clock))


# ---- counting ---------------------------------------------------------------------------------


def test_decoding_starts_after_the_prompts_and_takes_one_step_less_than_tokens() -> None:
    line = timeline([4, 4], [100.0, 103.0, 103.5, 104.0, 105.0])
    for _ in range(4):
        line.step([(0, 1), (1, 1)])
    assert line.done
    run = decode_run(line.rows, Case(2, 10, 4))
    assert run == Run(prefill_seconds=3.0, decode_seconds=2.0, tokens=6, steps=3)


def test_steps_in_which_not_all_decode_do_not_count() -> None:
    """Prompts in two steps: the first sequence gets ahead, and is complete a step earlier."""
    line = timeline([4, 4], [0.0, 1.0, 2.0, 2.5, 3.0, 9.0])
    for new in ([(0, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(1, 1)]):
        line.step(new)
    run = decode_run(line.rows, Case(2, 10, 4))
    assert run == Run(prefill_seconds=2.0, decode_seconds=1.0, tokens=4, steps=2)


def test_a_step_that_brings_nothing_is_no_step() -> None:
    """An engine whose step returns before there is a token has only looked."""
    line = timeline([2], [0.0, 1.0, 2.0, 4.0])
    for new in ([], [(0, 1)], [(0, 1)]):
        line.step(new)
    assert line.rows == [(2.0, 1, 1, 0), (4.0, 1, 1, 1)]
    assert decode_run(line.rows, Case(1, 5, 2)).steps == 1


def test_a_sequence_begins_with_its_first_token_and_not_with_its_name() -> None:
    line = timeline([2, 2], [0.0, 1.0, 2.0])
    line.step([(0, 1), (1, 0)])
    line.step([(0, 1), (1, 1)])
    assert [row[2:] for row in line.rows] == [(1, 0), (2, 1)]


def test_a_prefill_has_no_decode_step() -> None:
    line = timeline([1, 1], [0.0, 2.0])
    line.step([(0, 1), (1, 1)])
    assert decode_run(line.rows, Case(2, 8, 1)) == Run(2.0, 0.0, 0, 0)


def test_too_few_tokens_are_noticed() -> None:
    line = timeline([2], [0.0, 1.0])
    line.step([(0, 1)])
    with pytest.raises(EngineFailedError, match="returned 1 tokens instead of 1 x 2"):
        decode_run(line.rows, Case(1, 5, 2))


def test_too_many_tokens_are_noticed() -> None:
    line = timeline([2], [0.0, 1.0])
    with pytest.raises(RuntimeError, match="more tokens than requested"):
        line.step([(0, 3)])


def test_sequences_that_never_decode_together_are_noticed() -> None:
    line = timeline([2, 2], [0.0, 1.0, 2.0, 3.0, 4.0])
    for new in ([(0, 1)], [(0, 1)], [(1, 1)], [(1, 1)]):
        line.step(new)
    with pytest.raises(EngineFailedError, match="no step decodes all 2"):
        decode_run(line.rows, Case(2, 5, 2))


def test_every_engine_gets_the_same_prompts_and_every_repeat_others() -> None:
    case = Case(3, 7, 2)
    prompts = prompts_of(case, 50, 1)
    assert prompts == prompts_of(case, 50, 1) != prompts_of(case, 50, 2)
    assert [len(ids) for ids in prompts] == [7, 7, 7]
    assert all(0 <= token < 49 for ids in prompts for token in ids)
    assert prompts_of(case, 1, 0)[0] == [0] * 7


def test_lengths_are_seeded_and_within_their_limits() -> None:
    prompts, lengths = lognormal_lengths(200, 3, 300, 100)
    assert (prompts, lengths) == lognormal_lengths(200, 3, 300, 100)
    assert 8 <= min(prompts) < 100 < max(prompts) == 300
    assert 8 <= min(lengths) < 50 < max(lengths) == 100
    prompts, lengths = LENGTHS["uniform"](500, 3, 1024, 512)
    assert (prompts, lengths) == LENGTHS["uniform"](500, 3, 1024, 512)
    assert 100 <= min(prompts) < 110 < 1000 < max(prompts) <= 1024
    assert 100 <= min(lengths) < 110 < 500 < max(lengths) <= 512
    assert LENGTHS["uniform"](3, 3, 20, 4) == ([20] * 3, [4] * 3)


def test_spread_is_least_median_most() -> None:
    assert spread([3.0, 1.0, 9.0]) == {"min": 1.0, "median": 3.0, "max": 9.0}


# ---- in turn ----------------------------------------------------------------------------------


class FakeEngine:
    """Answers as it is told, and notes when it was awake. A step takes `step` seconds."""

    def __init__(self, name: str, log: list[tuple[str, str]], step: float = 0.5):
        self.name, self.group, self.step = name, 0, step
        self._log = log
        self.awake = True
        self.fails_at = -1
        self._asked = count()

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Facts, or the rows of a perfect run."""
        self._log.append((self.name, request["do"]))
        if next(self._asked) == self.fails_at:
            raise EngineFailedError(f"{self.name} fell over.")
        if request["do"] == "open":
            return {"version": "1"}
        batch, new = len(request["prompts"]), request["new_tokens"]
        if request["do"] == "offline":
            return {"seconds": 2.0, "tokens": sum(new)}
        last = new - 1
        return [(1 + self.step * n, batch, batch, batch * (n == last)) for n in range(new)]

    def pause(self) -> None:
        self.awake = False
        self._log.append((self.name, "pause"))

    def resume(self) -> None:
        self.awake = True
        self._log.append((self.name, "resume"))

    def close(self) -> None:
        self._log.append((self.name, "close"))


@pytest.fixture
def log() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def three(log: list[tuple[str, str]]) -> list[FakeEngine]:
    return [FakeEngine(name, log) for name in "abc"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What other programs use during each run, from the front; nothing when the list is empty."""
    shares: list[float] = []

    @contextmanager
    def watching(groups: object, busy: object) -> Iterator[Watch]:
        yield Watch(shares.pop(0) if shares else 0.0)

    monkeypatch.setattr(contest_module, "watching", watching)
    return shares


def test_engines_take_turns_and_every_repeat_begins_with_another(
    three: list[FakeEngine], log: list[tuple[str, str]]
) -> None:
    contest = Contest(three, 100)
    contest.open({})
    scores = contest.play(Case(2, 8, 4), repeats=3)
    order = "".join(name for name, what in log if what == "steps")
    assert order == "abc" + "bca" + "cab" + "abc"  # the warm-up, and three repeats
    assert [(score.engine, len(score.runs)) for score in scores] == [("a", 3), ("b", 3), ("c", 3)]


def test_one_engine_at_a_time_is_awake(three: list[FakeEngine], log: list[tuple[str, str]]) -> None:
    contest = Contest(three, 100)
    contest.open({})
    contest.play(Case(1, 8, 2), repeats=2)
    asleep = {name: False for name in "abc"}
    for place, (name, what) in enumerate(log):
        if what in ("pause", "resume"):
            asleep[name] = what == "pause"
        elif what == "steps":
            others = [other for other in "abc" if other != name]
            assert all(asleep[other] for other in others), f"entry {place} of {log}"
            assert not asleep[name]


def test_the_speeds_are_those_of_the_engines(log: list[tuple[str, str]]) -> None:
    fast, slow = FakeEngine("fast", log, 0.25), FakeEngine("slow", log, 2.0)
    scores = Contest([fast, slow], 100).play(Case(4, 8, 5), repeats=1)
    rates = [score.runs[0].tokens / score.runs[0].decode_seconds for score in scores]
    assert rates == [16.0, 2.0]


def test_an_engine_that_fails_is_out_and_the_others_go_on(
    three: list[FakeEngine], log: list[tuple[str, str]]
) -> None:
    three[1].fails_at = 2  # it loads and warms up
    contest = Contest(three, 100)
    contest.open({})
    scores = contest.play(Case(1, 8, 2), repeats=2)
    assert contest.failed == {"b": "b fell over."}
    assert log.count(("b", "close")) == 1
    assert [(score.engine, len(score.runs)) for score in scores] == [("a", 2), ("c", 2)]
    assert [score.engine for score in contest.play(Case(2, 8, 2), 1)] == ["a", "c"]


def test_an_engine_that_cannot_load_is_out(three: list[FakeEngine]) -> None:
    three[0].fails_at = 0
    contest = Contest(three, 100)
    contest.open({})
    assert (list(contest.failed), list(contest.facts)) == (["a"], ["b", "c"])


def test_when_all_have_failed_there_is_nothing(three: list[FakeEngine]) -> None:
    for one in three:
        one.fails_at = 1
    contest = Contest(three, 100)
    contest.open({})
    assert contest.play(Case(1, 8, 2), 2, extra=1) == []
    assert sorted(contest.failed) == ["a", "b", "c"]


def test_a_wrong_count_is_a_failure_of_that_engine(
    three: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(three[2], "ask", lambda request: [(1.0, 1, 1, 0)])
    contest = Contest(three, 100)
    scores = contest.play(Case(2, 8, 4), 1)
    assert [score.engine for score in scores] == ["a", "b"]
    assert contest.failed["c"].startswith("c: The engine returned 1 tokens instead of 2 x 4")


@pytest.mark.parametrize("answer", [None, 7, [], [[1.0]], [["a", "b", "c", "d"]], [(1.0, 8, 0, 0)]])
def test_an_answer_without_sense_is_a_failure_of_that_engine(
    three: list[FakeEngine], monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    monkeypatch.setattr(three[0], "ask", lambda request: answer)
    contest = Contest(three, 100)
    assert [score.engine for score in contest.play(Case(2, 8, 4), 1)] == ["b", "c"]
    assert contest.failed["a"].startswith("a")
    monkeypatch.setattr(three[1], "ask", lambda request: answer)
    assert list(contest.play_offline([[1]], [4], 1)[0]) == ["c"]


def test_disturbed_runs_are_made_again(three: list[FakeEngine], quiet: list[float]) -> None:
    """Of three repeats the first is disturbed for b; a fourth is made for all, and no fifth."""
    quiet[:] = [0.0] * 3 + [0.5, 0.0, 0.0]  # the warm-up; then b comes first
    contest = Contest(three, 100)
    scores = {score.engine: score for score in contest.play(Case(1, 8, 2), repeats=3, extra=3)}
    assert [run.others for run in scores["b"].runs] == [0.0, 0.0, 0.0]
    assert all(len(score.runs) == 3 for score in scores.values())
    assert quiet == []


def test_the_calmest_runs_are_chosen_by_what_others_did() -> None:
    runs = [Run(0, seconds, 1, 1, others) for seconds, others in
            ((9.0, 0.05), (1.0, 0.9), (5.0, 0.0), (7.0, 0.3))]  # fmt: skip
    assert [run.decode_seconds for run in calmest(runs, 2)] == [9.0, 5.0]
    assert [run.decode_seconds for run in calmest(runs, 3)] == [9.0, 5.0, 7.0]


def test_offline_work_is_done_in_turn_too(
    three: list[FakeEngine], log: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"seconds": 1.0, "tokens": 3}
    monkeypatch.setattr(three[1], "ask", lambda request: wrong)
    contest = Contest(three, 100)
    runs = contest.play_offline([[1], [2, 3]], [4, 5], 2)[0]
    assert {name: len(each) for name, each in runs.items()} == {"a": 2, "c": 2}
    assert contest.failed["b"] == "b: The engine returned 3 tokens instead of 9."


# ---- what others use --------------------------------------------------------------------------


def process(proc: Path, pid: int, group: int, ticks: int) -> None:
    """A process in a made-up /proc, with a name that looks like the end of a name."""
    (proc / str(pid)).mkdir()
    fields = ["S", "1", str(group), *["0"] * 8, str(ticks - 1), "1"]
    (proc / str(pid) / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}")


def test_ticks_are_those_of_the_groups_and_the_rest_is_others(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu  10 20 30 400 500 6 7 8 900 900\ncpu0 1 2 3 4\n")
    process(tmp_path, 11, 5, 100)
    process(tmp_path, 12, 5, 10)
    process(tmp_path, 13, 6, 1000)
    assert busy_ticks(tmp_path) == 10 + 20 + 30 + 6 + 7 + 8  # neither idle nor waiting for a disk
    assert own_ticks(frozenset({5}), tmp_path) == 110
    assert busy_ticks(tmp_path / "nowhere") == 0


def test_a_program_beside_us_is_seen_and_a_short_time_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two seconds of two processors 300 ticks were busy, 100 of them ours."""
    now = [0.0]
    monkeypatch.setattr(others, "perf_counter", lambda: now[0])
    monkeypatch.setattr(others.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(others.os, "sysconf", lambda name: 100)
    for seconds, share in ((2.0, 0.5), (0.05, 0.0), (0.5, 1.0)):
        proc = tmp_path / str(seconds)
        proc.mkdir()
        (proc / "stat").write_text("cpu  0 0 0 0 0 0 0 0\n")
        process(proc, 11, 5, 1)
        with others.watching([5], proc) as watch:
            now[0] += seconds
            (proc / "stat").write_text("cpu  250 0 50 0 0 0 0 0\n")
            (proc / "11" / "stat").write_text(f"11 (a) S 1 5 {'0 ' * 8} 100 1")
        assert watch.share == share
