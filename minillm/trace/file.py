"""Trace files in JSON lines: a header with the engine's settings, then one line per step.

Empty and zero fields are left out, and tuples are lists, so a step of one sequence takes about 200
bytes. Files are untrusted: every value is checked when one is read.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minillm.api.sampling_params import shown
from minillm.cache.manager import BlockCopy
from minillm.errors import TraceFileError
from minillm.scheduling.plan import Row
from minillm.scheduling.record import (
    Added,
    Blocked,
    Drafted,
    Ended,
    Forked,
    Preemption,
    RankTime,
    StepRecord,
)
from minillm.trace.recorder import Trace, TraceSettings
from minillm.trace.replay import PREEMPTED, RUNNING, SWAPPED, WAITING, Replay, SequenceState

VERSION = 4  # 3 had no `ranks`; 2 also had no `drafted` and no draft counts in a state
READABLE = (2, 3, VERSION)
MAX_COUNT = 2**31  # tokens, sequences, steps
MAX_BLOCKS = 2**24
MAX_NUMBER = 1e15  # times in seconds, priorities
CLOCK_TOLERANCE = 1e-3  # seconds
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)  # of damaged files
# The constructor of each kind of event.
EVENTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "added": Added,
        "rows": lambda *row: Row(*row)._replace(blocks=tuple(Row(*row).blocks)),
        "copies": BlockCopy,
        "swap_out": BlockCopy,
        "swap_in": BlockCopy,
        "preempted": Preemption,
        "stalled": Blocked,
        "drafted": Drafted,
        "forked": Forked,
        "ended": Ended,
        "ranks": RankTime,
    }
)
NUMBERS = tuple(field.name for field in fields(StepRecord) if field.type in (int, float))


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace. An existing file is replaced only when the new one is complete."""
    path = path.resolve()  # keep a symbolic link
    part = path.with_name(f"{path.name}.part") if path.is_file() else path
    with part.open("w", encoding="utf-8") as file:
        for line in trace_lines(trace):
            file.write(line + "\n")
    if part != path:
        part.replace(path)


def trace_lines(trace: Trace, last: int | None = None) -> Iterator[str]:
    """The lines of a trace file; with `last` only the latest completed steps."""
    replay, records = trace.snapshot()
    num_dropped = trace.num_dropped
    if last is not None:
        if records and not records[-1].computed:  # it is running
            records.pop()
        for record in records[:-last]:
            replay.apply(record)
            num_dropped += 1
        records = records[-last:]
    header = {
        "minillm_trace": VERSION,
        **asdict(trace.settings),
        "num_dropped": num_dropped,
        "before": [state_line(state) for state in replay.sequences.values()],
    }
    for line in (header, *map(record_line, records)):
        yield json.dumps(line, separators=(",", ":"))


def record_line(record: StepRecord) -> dict[str, Any]:
    """The JSON object of a step, without empty and zero fields."""
    line: dict[str, Any] = {name: getattr(record, name) for name in NUMBERS}
    for name in EVENTS:
        values = getattr(record, name)
        line[name] = [astuple(each) for each in values] if name == "stalled" else values
    line["admitted"], line["void"] = record.admitted, record.void
    line["why_eager"] = record.why_eager
    line["blocked"] = record.blocked and astuple(record.blocked)
    return {name: value for name, value in line.items() if value}


def state_line(state: SequenceState) -> dict[str, Any]:
    """The JSON object of a sequence that began before the first record. `first` has the counts of
    its request's first completion, which may have ended already."""
    line = {f.name: getattr(state, f.name) for f in fields(state)}
    first = state.first
    return line | {"first": first and [first.seq_id, first.num_completions, first.num_open]}


def load_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        TraceFileError: the file cannot be read, or is not a trace; the message names the line.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise TraceFileError(f"{path} cannot be read: {reason}.") from error
    return read_trace(lines, str(path))


def read_trace(lines: Sequence[str], name: str) -> Trace:
    """Read the lines of a trace file; `name` is for error messages.

    Raises:
        TraceFileError: the lines are not a trace.
    """
    if not lines:
        raise TraceFileError(f"{name} is empty; a trace is what llm.trace.save(...) writes.")
    trace, last = read_header(lines[0], name), 0
    replay, _ = trace.snapshot()
    for place, line in enumerate(lines[1:], 2):
        try:
            record = read_record(json.loads(line), trace.settings.num_blocks or MAX_BLOCKS)
            if record.step <= last:
                raise ValueError(f"step {record.step} comes after step {last}")
            check_order(record, replay)
            last = record.step
        except DAMAGE as error:
            why = "incomplete JSON" if isinstance(error, json.JSONDecodeError) else error
            raise TraceFileError(
                f"{name}, line {place}, is not a step of a trace ({why}); "
                "was the file cut off or edited?"
            ) from error
        trace.append(record)
    return trace


def read_header(line: str, name: str) -> Trace:
    """Create the trace from the first line, with unlimited capacity."""
    try:
        header = json.loads(line)
        version = header.pop("minillm_trace")
        num_dropped, before = header.pop("num_dropped"), header.pop("before")
        if version not in READABLE:
            raise TraceFileError(
                f"{name} is a trace of format {version}; this version reads formats "
                f"{' and '.join(map(str, READABLE))}."
            )
        trace = Trace(read_settings(header), capacity=2**62)
        trace.num_dropped = number(num_dropped)
        trace.restore(read_states(before, trace.settings.num_blocks or MAX_BLOCKS))
    except DAMAGE as error:
        if isinstance(error, TraceFileError):
            raise
        raise TraceFileError(
            f"{name} is not a trace of minillm; llm.trace.save(...) writes one."
        ) from error
    return trace


def read_settings(header: dict[str, Any]) -> TraceSettings:
    """The settings of the header, with names and types checked."""
    settings = TraceSettings(**header)
    for each in fields(TraceSettings):
        value = getattr(settings, each.name)
        if value is None and each.type is not int:
            continue
        if each.type == str | None:
            text(value)
        elif each.type == float | None:
            number(value)
        else:
            counts(value)
    if settings.num_blocks > MAX_BLOCKS:
        raise ValueError("num_blocks is too large")
    return settings


def read_record(line: dict[str, Any], num_blocks: int) -> StepRecord:
    """The record of a line, checked; blocks must be below `num_blocks`."""
    record = StepRecord(number(line.pop("step")))
    for name, value in line.items():
        if name in NUMBERS:
            setattr(record, name, number(value))
        elif name in ("admitted", "void"):
            setattr(record, name, [number(each) for each in value])
        elif name == "blocked":
            record.blocked = Blocked(*value)
        elif name == "why_eager":
            text(value)
            record.why_eager = value
        elif name in EVENTS:
            setattr(record, name, [EVENTS[name](*each) for each in value])
        else:
            raise ValueError(f"{shown(name)} is not a field of a step")
    check_events(record)
    check_blocks((block for row in record.rows for block in row.blocks), num_blocks)
    return record


def check_events(record: StepRecord) -> None:
    """Check the types of a record's events, on which replay and drawings rely."""
    for added in record.added:
        check_added(added)
    for row in record.rows:
        counts(*row[:5], *row.blocks)
    plain = (record.copies, record.swap_out, record.swap_in, record.forked, record.drafted)
    for events in plain:
        for each in events:
            counts(*each)
    check_drafts(record)
    for time in record.ranks:
        counts(time.rank)
        if not 0 <= number(time.communicating) <= number(time.seconds) + CLOCK_TOLERANCE:
            raise ValueError(f"rank {time.rank} communicates longer than its step takes")
    for preemption in record.preempted:
        counts(preemption.seq_id, preemption.for_seq_id, preemption.num_tokens)
        text(preemption.mode)
    for ended in record.ended:
        counts(ended.seq_id, ended.num_tokens)
        text(ended.reason)
        if not isinstance(ended.discarded, bool):
            raise ValueError(f"{shown(ended.discarded)} is not true or false")
        if ended.time is not None:
            number(ended.time)
    for blocked in (*record.stalled, *([record.blocked] if record.blocked else [])):
        counts(blocked.seq_id, blocked.needed, max(blocked.available, 0))
        text(blocked.request_id)
        text(blocked.what)
    counts(record.step, *record.admitted, *record.void)


def check_drafts(record: StepRecord) -> None:
    """Check that a row has logits for its drafts, and that no more are accepted than drafted."""
    most = {row.seq_id: row.num_logits - 1 for row in record.rows}
    if len({one.seq_id for one in record.drafted}) < len(record.drafted):
        raise ValueError("a sequence has drafts twice")
    for one in record.drafted:
        if not one.num_accepted <= one.num_drafted <= most.get(one.seq_id, -1):
            raise ValueError(f"{one.num_accepted} of {one.num_drafted} drafts are accepted")


def check_added(added: Added) -> None:
    """Check the types of an arrival."""
    text(added.request_id)
    number(added.arrival)
    number(added.priority)
    counts(added.seq_id, *added[2:5])


def check_blocks(blocks: Iterable[int], num_blocks: int) -> None:
    """Check that block numbers are below `num_blocks`."""
    most = max(blocks, default=0)
    if most >= num_blocks:
        raise ValueError(f"there is no block {most}")


def check_order(record: StepRecord, replay: Replay) -> None:
    """Check that a step can follow the steps applied to `replay`, and apply it."""
    come = [each.seq_id for each in record.added] + [each.seq_id for each in record.forked]
    if len(set(come)) < len(come) or not replay.sequences.keys().isdisjoint(come):
        raise ValueError("a sequence arrives twice")
    gone = [each.seq_id for each in record.ended]
    if len(set(gone)) < len(gone):
        raise ValueError("a sequence ends twice")
    replay.apply(record)


def read_states(before: Iterable[dict[str, Any]], num_blocks: int) -> list[SequenceState]:
    """The sequences that were unfinished before the first recorded step, checked."""
    states: dict[int, SequenceState] = {}
    firsts: dict[int, SequenceState] = {}
    for line in sorted(before, key=lambda line: number(line["index"])):
        first, added = line.pop("first"), line.pop("added")
        state = SequenceState(**line)
        check_state(state, num_blocks)
        if added is not None:
            state.added = Added(*added)
            check_added(state.added)
        if state.seq_id in states:
            raise ValueError("a sequence is listed twice")
        states[state.seq_id] = state
        if first is None:
            firsts[state.seq_id] = state
        else:
            seq_id, num_completions, num_open = first
            counts(seq_id, num_completions, num_open)
            stub = SequenceState(seq_id, state.added)
            stub.num_completions, stub.num_open = num_completions, num_open
            state.first = firsts.setdefault(seq_id, stub)
    return list(states.values())


def check_state(state: SequenceState, num_blocks: int) -> None:
    """Check the types of a state, on which replay relies."""
    for each in fields(state):
        value = getattr(state, each.name)
        if each.type is int:
            counts(value)
        elif each.type == float | None and value is not None:
            number(value)
    if not isinstance(state.blocks, list) or not isinstance(state.end, str | None):
        raise ValueError("blocks is not a list, or end is not a text")
    counts(*state.blocks)
    check_blocks(state.blocks, num_blocks)
    if state.where not in (WAITING, PREEMPTED, SWAPPED, RUNNING):
        raise ValueError(f"where is {shown(state.where)}")


def counts(*values: Any) -> None:
    """Check that values are whole numbers from 0 to `MAX_COUNT` - 1."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_COUNT:
            raise ValueError(f"{shown(value)} is not a count below {MAX_COUNT:,}")


def number(value: Any) -> Any:
    """`value` if it is a number below `MAX_NUMBER`; anything else is an error."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -MAX_NUMBER < value < MAX_NUMBER:  # also refuses NaN
        raise ValueError(f"{shown(value)} is not a number")
    return value


def text(value: Any) -> None:
    """Check that a value is a string."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a text")
