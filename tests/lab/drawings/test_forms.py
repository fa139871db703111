"""The other forms of a trace: JSON lines and back, Perfetto's events, the text table."""

import contextlib
import copy
import gc
import json
import random
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minillm import SamplingParams
from minillm.errors import TraceFileError
from minillm.lab.drawings.timeline import NAMES, timeline
from minillm.lab.simulated_drafts import SimulatedDrafts
from minillm.lab.simulation import Simulation
from minillm.trace.file import state_line
from minillm.trace.recorder import Trace
from minillm.trace.replay import SequenceState
from tests.trace.drafts import Truth, speculating
from tests.trace.workload import HOST_GIB, engine, run


@pytest.fixture(scope="module", params=["whole", "begins in the middle", "with drafts"])
def trace(folder: Path, request: pytest.FixtureRequest) -> Trace:
    more = speculating(Truth(folder, 0.2)) if request.param == "with drafts" else {}
    with engine(folder, swap_space=HOST_GIB, **more) as llm:
        if request.param == "begins in the middle":
            llm.engine.trace = Trace(llm.trace.settings, 50_000)
        run(llm, 1, 40)
        assert bool(llm.trace.num_dropped) == (request.param == "begins in the middle")
        return llm.trace


@pytest.fixture(scope="module")
def drafted(folder: Path) -> Trace:
    """One request, whose drafts are right but for some."""
    with engine(folder, **speculating(Truth(folder, 0.3))) as llm:
        params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        first = next(record.drafted[0] for record in llm.trace if record.drafted)
        assert 1 < first.num_accepted < first.num_drafted == 4
        return llm.trace


TWICE = '{{"step":1,"{0}":[[9999,{1}],[9999,{1}]]}}'


def with_before(header: str, **wrong: object) -> str:
    """The first line of a trace before which one sequence ran, of which something is wrong."""
    state = state_line(SequenceState(0)) | wrong
    return msgspec.json.encode(json.loads(header) | {"before": [state]}).decode()


# ---- JSON lines -------------------------------------------------------------------------------


def test_what_is_saved_is_read_again(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    trace.save(path)
    again = Trace.load(path)
    assert list(again) == list(trace)
    assert (again.settings, again.num_dropped) == (trace.settings, trace.num_dropped)
    assert again.snapshot()[0].sequences == trace.snapshot()[0].sequences
    assert timeline(again) == timeline(trace)
    assert again.requests() == trace.requests()
    assert len(path.read_text().splitlines()) == 1 + len(trace)
    again.save(tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()


def test_a_save_that_breaks_off_leaves_the_old_file(trace, tmp_path, monkeypatch):
    path, link = tmp_path / "run.jsonl", tmp_path / "link.jsonl"
    trace.save(path)
    link.symlink_to(path)
    before = path.read_bytes()
    monkeypatch.setattr("minillm.trace.file.encode", iter([b"{}"]).__next__)
    with pytest.raises(TypeError):
        trace.save(link)
    assert path.read_bytes() == before
    monkeypatch.undo()
    trace.save(link)
    assert (path.read_bytes(), link.is_symlink()) == (before, True)
    assert Trace.load(path)[0].step == trace[0].step


def test_a_file_of_the_format_before_is_read(folder: Path, tmp_path: Path) -> None:
    """It knew of no drafts: neither in steps nor in those who ran before the first."""
    path = tmp_path / "old.jsonl"
    with engine(folder) as llm:
        llm.engine.trace = Trace(llm.trace.settings, 20_000)
        run(llm, 1, 12)
        llm.trace.save(path)
        expected = llm.trace
    header, *steps = path.read_text().splitlines()
    head = json.loads(header) | {"minillm_trace": 2}
    assert head["before"]
    for state in head["before"]:
        assert state.pop("num_draft_tokens") == state.pop("num_accepted_tokens") == 0
    path.write_text("\n".join([json.dumps(head), *steps]))
    again = Trace.load(path)
    assert list(again) == list(expected)
    assert timeline(again) == timeline(expected)
    again.save(path)
    assert '"minillm_trace":4' in path.read_text().splitlines()[0]


@pytest.mark.parametrize(("old", "new", "why"), [
    ('"drafted":[[0,4,', '"drafted":[[0,9,', "of 9 drafts"),
    ('"drafted":[[0,4,', '"drafted":[[0,4.5,', "drafted.0..1. is 4.5; expected `int`, got `float`"),
    ('"drafted":[[0,', '"drafted":[[0,4,1,1],[0,', "has drafts twice"),
])  # fmt: skip
def test_drafts_that_cannot_be_are_refused(drafted, tmp_path, old, new, why):
    path = tmp_path / "run.jsonl"
    drafted.save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(TraceFileError, match=why):
        Trace.load(path)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda lines: [], "is empty"), (lambda lines: ["{}"], "is not a trace of minillm"),
    (lambda lines: [lines[0].replace('"minillm_trace":4', '"minillm_trace":99')], "format 99"),
    (lambda lines: [lines[0].replace('"model"', '"modl"')], "is not a trace of minillm"),
    (lambda lines: [lines[0].replace('"num_blocks":18', '"num_blocks":1e99')], "is not a tr"),
    (lambda lines: [*lines[:-1], lines[-1][:-9]], "was the file cut off"),
    (lambda lines: [lines[0], lines[3], lines[2]], "line 3, is not a step"),
    (lambda lines: [lines[0], '{"step":1,"rows":[["a",0,1,1,0,[]]]}'], "line 2"),
    (lambda lines: [lines[0], '{"step":1,"color":"red"}'], "unknown field `color`"),
    (lambda lines: [lines[0], '{"step":1,"rows":[[0,0,1,1,0,[999999999]]]}'], "line 2"),
    (lambda lines: [lines[0], '{"step":1,"started":NaN}'], "line 2"),
    (lambda lines: [lines[0], "[" * 100_000], "line 2"),
    (lambda lines: [lines[0], '{"step":1,"started":1' + "0" * 400 + "}"], "line 2"),
    (lambda lines: [lines[0], '{"step":1,"rows":[[0,1' + "0" * 900 + ",1,1,0,[]]]}"], "line 2"),
    (lambda lines: [lines[0], '{"step":1,"blocked":["a","a","batch slots",1,0]}'], "line 2"),
    (lambda lines: [lines[0], '{"step":1,"ended":[[9999,"stop",2,false,""]]}'], "line 2"),
    (lambda lines: [lines[0], TWICE.format("ended", '"stop",2,false,null')], "ends twice"),
    (lambda lines: [lines[0], TWICE.format("added", '"a",1,1,1,0,0.5')], "arrives twice"),
    (lambda lines: [with_before(lines[0], num_tokens={})], "is not a trace of minillm"),
    (lambda lines: [with_before(lines[0], first_token="noon")], "is not a trace of minillm"),
])  # fmt: skip
def test_a_damaged_file_is_refused_in_one_sentence(trace, tmp_path, spoil, message):
    path = tmp_path / "run.jsonl"
    trace.save(path)
    path.write_text("\n".join(spoil(path.read_text().splitlines())))
    with pytest.raises(TraceFileError) as caught:
        Trace.load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_an_edited_trace_is_refused_or_drawn(trace: Trace, tmp_path: Path) -> None:
    """Never a traceback: one value anywhere in the file is replaced by another."""
    path, rng, num_read = tmp_path / "run.jsonl", random.Random(5), 0
    trace.save(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()[:40]]
    for _ in range(150):
        edited = copy.deepcopy(lines)
        inside, key = rng.choice(list(places(edited)) if rng.random() < 0.3 else
                                 list(places(edited[rng.choice([0, -1, 9])])))  # fmt: skip
        inside[key] = rng.choice([None, True, -1, 0, 1, 3, 10**400, 1.5, "x", [], {}, [None]])
        path.write_text("\n".join(map(json.dumps, edited)))
        with contextlib.suppress(TraceFileError):
            again = Trace.load(path)
            num_read += 1
            assert again.html()
            assert again.table(None)
            assert again.chrome_events()
            again.requests()
    assert num_read


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All lists and dictionaries in a value, with each of their keys."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], list | dict):
            yield from places(value[key])


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    for name, why in (("none.jsonl", ": No such file"), ("binary", ": it is not text"), ("", "")):
        with pytest.raises(TraceFileError, match=f"cannot be read{why}"):
            Trace.load(tmp_path / name)


# ---- Perfetto ---------------------------------------------------------------------------------


def test_events_nest_and_do_not_overlap(trace: Trace, tmp_path: Path) -> None:
    trace.save_chrome(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    assert min(times) >= 0
    lines: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X" and not event["name"].startswith("step "):
            assert event["dur"] >= 0
            place = lines.setdefault((event["pid"], event["tid"]), [])
            place.append((event["ts"], event["ts"] + event["dur"]))
    for line in lines.values():
        for (_, end), (start, _) in pairwise(line):
            assert start >= end - 0.01  # a hundredth of a microsecond: rounding
    steps = [event for event in events if event["name"].startswith("step ")]
    assert [event["name"] for event in steps] == [f"step {record.step}" for record in trace]
    for event, record in zip(steps, trace, strict=True):
        assert event["dur"] == pytest.approx((record.delivered - record.started) * 1e6, abs=0.01)
        assert event["args"]["decode"] == record.num_decode_tokens
        assert event["args"].get("drafted", 0) == sum(one.num_drafted for one in record.drafted)
        assert event["args"].get("accepted", 0) == sum(one.num_accepted for one in record.drafted)
    assert len(lines) == 1 + len(timeline(trace)["sequences"])
    assert {e["name"] for e in events if e["ph"] == "X" and e["pid"] == 2} <= set(NAMES.values())
    assert {e["name"] for e in events if e["ph"] == "C"} == {"sequences", "tokens", "blocks"}
    spans = [event["args"] for event in events if event["ph"] == "X" and event["pid"] == 2]
    for ours, theirs in (("drafted", "num_drafted"), ("accepted", "num_accepted")):
        wanted = sum(getattr(one, theirs) for record in trace for one in record.drafted)
        assert sum(args.get(ours, 0) for args in spans) == wanted
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 2]
    assert names == [sequence["name"] for sequence in timeline(trace)["sequences"]]


# ---- text -------------------------------------------------------------------------------------


def test_the_table_has_a_line_per_step_and_says_who_waits(trace: Trace) -> None:
    lines = trace.table(None).splitlines()
    assert len(lines) == 1 + len(trace)
    assert len(trace.table(5).splitlines()) == 6
    for line, record in zip(lines[1:], trace, strict=True):
        cells = line.split()
        assert int(cells[0].replace(",", "")) == record.step
        assert [int(cell) for cell in cells[2:8]] == [
            record.num_running, record.num_waiting, record.num_prefill_tokens,
            record.num_decode_tokens, record.num_recomputed_tokens, record.num_free_blocks,
        ]  # fmt: skip
        if record.blocked is not None:
            assert f"{record.blocked.seq_id} waits: {record.blocked}" in line
        for one in record.preempted:
            assert f"{one.seq_id} for {one.for_seq_id} ({one.mode})" in line


def test_drafts_have_a_column_where_there_are_any(trace: Trace, drafted: Trace) -> None:
    assert ("drafted/accepted" in trace.table(None)) == any(record.drafted for record in trace)
    lines = drafted.table(None).splitlines()
    assert lines[0].split()[8] == "drafted/accepted"
    for line, record in zip(lines[1:], drafted, strict=True):
        (one,) = record.drafted or [None]
        assert line.split()[8] == ("-" if one is None else f"{one.num_drafted}/{one.num_accepted}")


def test_a_trace_is_a_sequence(trace: Trace) -> None:
    assert trace[-1] is list(trace)[-1]
    assert trace[2:4] == list(trace)[2:4]
    assert len(trace) > 10
    assert f"steps {trace[0].step:,} to {trace[-1].step:,}" in repr(trace)
    assert "no step yet" in repr(Trace())


def test_what_follows_a_cleared_step_is_known(folder: Path) -> None:
    """An abort belongs to the step before it, and a step may be cleared while it runs."""
    with engine(folder) as llm:
        core, params = llm.engine, SamplingParams(max_tokens=8, n=2, ignore_eos=True)
        for name in "ab":
            core.add(core.make_request(name, None, [1, 2, 3], params))
        launch = core.runner.launch

        def clearing(plan: object) -> object:
            llm.trace.clear()
            return launch(plan)

        core.runner.launch = clearing
        core.step()
        core.abort("a")
        core.step()
        del core.runner.launch
        while core.has_work:
            core.step()
        replay, records = llm.trace.snapshot()
        assert {state.request_id for state in replay.sequences.values()} == {"b"}
        assert llm.trace.num_dropped + len(records) == core.scheduler.counters.num_steps
        for record in records:
            replay.apply(record)
        assert not replay.sequences
        assert not any(replay.holders.values())
        assert [one.num_tokens for one in llm.trace.requests()] == [(8, 8)]


@pytest.mark.parametrize(("block_size", "prompt", "new", "speculation"), [
    pytest.param(16, 2048, 1, None, marks=pytest.mark.slow),
    pytest.param(1, 2048, 1, None, marks=pytest.mark.slow), (16, 600, 50, None),
    (16, 20, 200, SimulatedDrafts((0.2,))),
])  # fmt: skip
def test_records_take_no_more_bytes_than_they_are_counted_for(block_size, prompt, new, speculation):
    """A long prompt per step, whose row names many blocks; steps of 40 rows, without and with
    drafts."""
    seqs = 1 if new == 1 else 40
    blocks = seqs * (-(-(prompt + new) // block_size) + 1)
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": 24_000}
    sim = Simulation(blocks, block_size, speculation=speculation, **limits)
    sim.trace = trace = Trace(sim.trace.settings, capacity=2 * 10**6)
    tracemalloc.start()
    try:
        while trace.num_dropped < 50:
            for _ in range(seqs - len(sim.scheduler.sequences)):
                sim.add(prompt, new)
            sim.step()
        assert len(trace) > 50
        gc.collect()
        whole, _ = tracemalloc.get_traced_memory()
        trace._records.clear()
        gc.collect()
        without, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 10**6 < whole - without <= 2 * 10**6
