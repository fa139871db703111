"""A trace as JSON lines: what engine it was, then one line per step.

Fields that are empty or zero are left out, tuples are lists, so a step of one sequence takes about
200 bytes. Every value is checked when a file is read: it may come from anywhere.
"""

import json
from collections.abc import Callable, Iterable, Mapping
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

VERSION = 4  # 3 had no `ranks`; 2 had no `drafted`, nor the counts of it in a state
READABLE = (2, 3, VERSION)
MOST = 2**31  # of tokens, sequences, steps
MOST_BLOCKS = 2**24
MOST_OF_A_NUMBER = 1e15  # seconds, say
CLOCKS_DIFFER = 1e-3  # seconds
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)  # in what is read
# How each list of a record is made again from a list of lists.
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
    """Write a trace. A file that exists is replaced when the new one is whole, not before."""
    replay, records = trace.snapshot()
    header = {
        "minillm_trace": VERSION,
        **asdict(trace.settings),
        "num_dropped": trace.num_dropped,
        "before": [state_line(state) for state in replay.sequences.values()],
    }
    path = path.resolve()  # a link stays one
    part = path.with_name(f"{path.name}.part") if path.is_file() else path
    with part.open("w", encoding="utf-8") as file:
        for line in (header, *map(record_line, records)):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    if part != path:
        part.replace(path)


def record_line(record: StepRecord) -> dict[str, Any]:
    """One step, without what is empty."""
    line: dict[str, Any] = {name: getattr(record, name) for name in NUMBERS}
    for name in EVENTS:
        values = getattr(record, name)
        line[name] = [astuple(each) for each in values] if name == "stalled" else values
    line["admitted"], line["void"] = record.admitted, record.void
    line["why_eager"] = record.why_eager
    line["blocked"] = record.blocked and astuple(record.blocked)
    return {name: value for name, value in line.items() if value}


def state_line(state: SequenceState) -> dict[str, Any]:
    """A sequence that began before the first record; the first completion of its request may have
    ended meanwhile, but still counts the others."""
    line = {f.name: getattr(state, f.name) for f in fields(state)}
    first = state.first
    return line | {"first": first and [first.seq_id, first.num_completions, first.num_open]}


def load_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        TraceFileError: the file cannot be read, or is no trace; the message names the line.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise TraceFileError(f"{path} cannot be read: {reason}.") from error
    if not lines:
        raise TraceFileError(f"{path} is empty; a trace is what llm.trace.save(...) writes.")
    trace, last = read_header(lines[0], path), 0
    replay, _ = trace.snapshot()
    for place, line in enumerate(lines[1:], 2):
        try:
            record = read_record(json.loads(line), trace.settings.num_blocks or MOST_BLOCKS)
            if record.step <= last:
                raise ValueError(f"step {record.step} comes after step {last}")
            check_story(record, replay)
            last = record.step
        except DAMAGE as error:
            why = "no whole JSON" if isinstance(error, json.JSONDecodeError) else error
            raise TraceFileError(
                f"{path}, line {place}, is not a step of a trace ({why}); "
                "was the file cut off or edited?"
            ) from error
        trace.append(record)
    return trace


def read_header(line: str, path: Path) -> Trace:
    """The first line; the trace has room for all that follow."""
    try:
        header = json.loads(line)
        version = header.pop("minillm_trace")
        num_dropped, before = header.pop("num_dropped"), header.pop("before")
        if version not in READABLE:
            raise TraceFileError(
                f"{path} is a trace of format {version}; this version reads formats "
                f"{' and '.join(map(str, READABLE))}."
            )
        trace = Trace(read_settings(header), capacity=2**62)
        trace.num_dropped = number(num_dropped)
        trace.restore(read_states(before, trace.settings.num_blocks or MOST_BLOCKS))
    except DAMAGE as error:
        if isinstance(error, TraceFileError):
            raise
        raise TraceFileError(
            f"{path} is not a trace of minillm; llm.trace.save(...) writes one."
        ) from error
    return trace


def read_settings(header: dict[str, Any]) -> TraceSettings:
    """Only names that exist, and only values of their kinds."""
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
    if settings.num_blocks > MOST_BLOCKS:
        raise ValueError("num_blocks")
    return settings


def read_record(line: dict[str, Any], num_blocks: int) -> StepRecord:
    """A step from its line; every block must exist."""
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
            raise ValueError(f"{shown(name)} is no field of a step")
    check_events(record)
    check_blocks((block for row in record.rows for block in row.blocks), num_blocks)
    return record


def check_events(record: StepRecord) -> None:
    """Identifiers are counts, names are texts: what replays and draws them relies on it."""
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
        if not 0 <= number(time.communicating) <= number(time.seconds) + CLOCKS_DIFFER:
            raise ValueError(f"rank {time.rank} communicates longer than it takes")
    for preemption in record.preempted:
        counts(preemption.seq_id, preemption.for_seq_id, preemption.num_tokens)
        text(preemption.mode)
    for ended in record.ended:
        counts(ended.seq_id, ended.num_tokens)
        text(ended.reason)
        if not isinstance(ended.in_vain, bool):
            raise ValueError(f"{shown(ended.in_vain)} is not true or false")
        if ended.time is not None:
            number(ended.time)
    for blocked in (*record.stalled, *([record.blocked] if record.blocked else [])):
        counts(blocked.seq_id, blocked.needed, max(blocked.available, 0))
        text(blocked.request_id)
        text(blocked.what)
    counts(record.step, *record.admitted, *record.void)


def check_drafts(record: StepRecord) -> None:
    """No more drafts than a row has logits for, and no more accepted than there were."""
    most = {row.seq_id: row.num_logits - 1 for row in record.rows}
    if len({one.seq_id for one in record.drafted}) < len(record.drafted):
        raise ValueError("a sequence has drafts twice")
    for one in record.drafted:
        if not one.num_accepted <= one.num_drafted <= most.get(one.seq_id, -1):
            raise ValueError(f"{one.num_accepted} of {one.num_drafted} drafts")


def check_added(added: Added) -> None:
    """The same for how a request came."""
    text(added.request_id)
    number(added.arrival)
    number(added.priority)
    counts(added.seq_id, *added[2:5])


def check_blocks(blocks: Iterable[int], num_blocks: int) -> None:
    """Every block must exist."""
    most = max(blocks, default=0)
    if most >= num_blocks:
        raise ValueError(f"there is no block {most}")


def check_story(record: StepRecord, replay: Replay) -> None:
    """A step must be one that can follow those before, which were applied."""
    come = [each.seq_id for each in record.added] + [each.seq_id for each in record.forked]
    if len(set(come)) < len(come) or not replay.sequences.keys().isdisjoint(come):
        raise ValueError("a sequence comes twice")
    gone = [each.seq_id for each in record.ended]
    if len(set(gone)) < len(gone):
        raise ValueError("a sequence ends twice")
    replay.apply(record)


def read_states(before: Iterable[dict[str, Any]], num_blocks: int) -> list[SequenceState]:
    """The sequences that ran when the first step was recorded."""
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
            raise ValueError("a sequence comes twice")
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
    """What replays it computes with these."""
    for each in fields(state):
        value = getattr(state, each.name)
        if each.type is int:
            counts(value)
        elif each.type == float | None and value is not None:
            number(value)
    if not isinstance(state.blocks, list) or not isinstance(state.end, str | None):
        raise ValueError("blocks or end")
    counts(*state.blocks)
    check_blocks(state.blocks, num_blocks)
    if state.where not in (WAITING, PREEMPTED, SWAPPED, RUNNING):
        raise ValueError("where")


def counts(*values: Any) -> None:
    """Whole numbers from 0, small enough for what is made of them."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST:
            raise ValueError(f"{shown(value)} is not a count below {MOST:,}")


def number(value: Any) -> Any:
    """A number as it is; anything else is an error."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -MOST_OF_A_NUMBER < value < MOST_OF_A_NUMBER:  # NaN is not
        raise ValueError(f"{shown(value)} is not a number")
    return value


def text(value: Any) -> None:
    """A text; anything else is an error."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not a text")
