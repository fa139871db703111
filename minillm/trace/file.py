"""Trace files in JSON lines: a header with the engine's settings, then one line per step.

Fields with their default are left out, and events are lists, so a step of one sequence takes about
200 bytes. Files are untrusted: every value is checked when one is read (msgspec, by the types of
`StepRecord`, `TraceSettings` and `SequenceState`).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec import MsgspecError, ValidationError, convert
from msgspec.json import Decoder, decode, encode

from minillm.api.sampling_params import shown
from minillm.cache.manager import Count
from minillm.errors import TraceFileError
from minillm.scheduling.record import StepRecord
from minillm.trace.recorder import MAX_BLOCKS, Trace, TraceSettings
from minillm.trace.replay import PREEMPTED, RUNNING, SWAPPED, WAITING, Replay, SequenceState

T = TypeVar("T")
VERSION = 4  # 3 had no `ranks`; 2 also had no `drafted` and no draft counts in a state
READABLE = (2, 3, VERSION)
CLOCK_TOLERANCE = 1e-3  # seconds
# Of damaged files.
DAMAGE = (MsgspecError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
DECODER = Decoder(StepRecord)


class First(NamedTuple):
    """A request's first completion, which may have ended, with its counts of completions."""

    seq_id: Count
    num_completions: Count
    num_open: Count


def save_trace(trace: Trace, path: Path) -> None:
    """Write a trace. An existing file is replaced only when the new one is complete."""
    path = path.resolve()  # keep a symbolic link
    part = path.with_name(f"{path.name}.part") if path.is_file() else path
    with part.open("wb") as file:
        for line in trace_lines(trace):
            file.write(line + b"\n")
    if part != path:
        part.replace(path)


def trace_lines(trace: Trace, last: int | None = None) -> Iterator[bytes]:
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
    yield encode(header)
    yield from map(encode, records)


def state_line(state: SequenceState) -> dict[str, Any]:
    """The JSON object of a sequence that began before the first record. `first` has the counts of
    its request's first completion, which may have ended already."""
    line = {f.name: getattr(state, f.name) for f in fields(state)}
    first = state.first
    return line | {"first": first and First(first.seq_id, first.num_completions, first.num_open)}


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
            record = read_record(line, trace.settings.num_blocks or MAX_BLOCKS)
            if record.step <= last:
                raise ValueError(f"step {record.step} comes after step {last}")
            check_order(record, replay)
            last = record.step
        except DAMAGE as error:
            raise TraceFileError(
                f"{name}, line {place}, is not a step of a trace ({error}); "
                "was the file cut off or edited?"
            ) from error
        trace.append(record)
    return trace


def read_header(line: str, name: str) -> Trace:
    """Create the trace from the first line, with unlimited capacity."""
    try:
        header = decode(line, type=dict[str, Any])
        version = header.pop("minillm_trace")
        num_dropped, before = header.pop("num_dropped"), header.pop("before")
        if version not in READABLE:
            raise TraceFileError(
                f"{name} is a trace of format {shown(version)}; this version reads formats "
                f"{' and '.join(map(str, READABLE))}."
            )
        trace = Trace(checked(header, TraceSettings), capacity=2**62)
        trace.num_dropped = convert(num_dropped, Count)
        trace.restore(read_states(before, trace.settings.num_blocks or MAX_BLOCKS))
    except DAMAGE as error:
        if isinstance(error, TraceFileError):
            raise
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise TraceFileError(
            f"{name} is not a trace of minillm ({why}); llm.trace.save(...) writes one."
        ) from error
    return trace


def checked(line: dict[str, Any], kind: type[T]) -> T:
    """The dataclass of these values. Each has its field's type; names without a field are wrong."""
    for name in line.keys() - {field.name for field in fields(kind)}:  # type: ignore[arg-type]
        raise ValueError(f"{shown(name)} is not a field of it")
    try:
        return convert(line, kind)
    except ValidationError as error:
        raise ValueError(explained(error, line)) from error


def explained(error: ValidationError, value: Any) -> str:
    """Which part of a value is wrong, and what is allowed: "rows[0][2] is 'x'; expected `int`"."""
    what, _, path = str(error).partition(" - at `$")
    for name, place in re.findall(r"\.(\w+)|\[(\d+)]", path):
        value = value[name or int(place)]
    return (
        f"{path[:-1].lstrip('.')} is {shown(value)}; {what[0].lower()}{what[1:]}" if path else what
    )


def read_record(line: str | bytes, num_blocks: int) -> StepRecord:
    """The record of a line, checked; blocks must be below `num_blocks`."""
    try:
        record = DECODER.decode(line)
    except ValidationError as error:
        raise ValueError(explained(error, decode(line))) from error
    check_drafts(record)
    for time in record.ranks:
        if not 0 <= time.communicating <= time.seconds + CLOCK_TOLERANCE:
            raise ValueError(f"rank {time.rank} communicates longer than its step takes")
    check_blocks((block for row in record.rows for block in row.blocks), num_blocks)
    return record


def check_drafts(record: StepRecord) -> None:
    """Check that a row has logits for its drafts, and that no more are accepted than drafted."""
    most = {row.seq_id: row.num_logits - 1 for row in record.rows}
    if len({one.seq_id for one in record.drafted}) < len(record.drafted):
        raise ValueError("a sequence has drafts twice")
    for one in record.drafted:
        if not one.num_accepted <= one.num_drafted <= most.get(one.seq_id, -1):
            raise ValueError(f"{one.num_accepted} of {one.num_drafted} drafts are accepted")


def check_blocks(blocks: Iterable[int], num_blocks: int) -> None:
    """Check that block numbers are below `num_blocks`."""
    most = max(blocks, default=0)
    if most >= num_blocks:
        raise ValueError(f"there is no block {most}")


def check_order(record: StepRecord, replay: Replay) -> None:
    """Check that a step can follow the steps applied to `replay`, and apply it."""
    come = [seq.seq_id for seq in record.added] + [seq.seq_id for seq in record.forked]
    if len(set(come)) < len(come) or not replay.sequences.keys().isdisjoint(come):
        raise ValueError("a sequence arrives twice")
    gone = [seq.seq_id for seq in record.ended]
    if len(set(gone)) < len(gone):
        raise ValueError("a sequence ends twice")
    replay.apply(record)


def read_states(before: Any, num_blocks: int) -> list[SequenceState]:
    """The sequences that were unfinished before the first recorded step, checked."""
    states: dict[int, SequenceState] = {}
    firsts: dict[int, SequenceState] = {}
    lines = convert(before, list[dict[str, Any]])
    for line in sorted(lines, key=lambda line: line["index"]):
        first = convert(line.pop("first"), First | None)
        state = checked(line, SequenceState)
        check_blocks(state.blocks, num_blocks)
        if state.where not in (WAITING, PREEMPTED, SWAPPED, RUNNING):
            raise ValueError(f"where is {shown(state.where)}")
        if state.seq_id in states:
            raise ValueError("a sequence is listed twice")
        states[state.seq_id] = state
        if first is None:
            firsts[state.seq_id] = state
        else:
            stub = SequenceState(first.seq_id, state.added)
            stub.num_completions, stub.num_open = first.num_completions, first.num_open
            state.first = firsts.setdefault(first.seq_id, stub)
    return list(states.values())
