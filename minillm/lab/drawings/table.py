"""A trace as a text table with one line per step."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from minillm.scheduling.record import StepRecord
from minillm.trace.recorder import Trace

# Heading -> the cell of a step.
COLUMNS: Mapping[str, Callable[[StepRecord], str]] = MappingProxyType(
    {
        "step": lambda r: f"{r.step:,}",
        "ms": lambda r: f"{max(r.delivered - r.started, 0) * 1e3:.1f}",
        "run": lambda r: f"{r.num_running}",
        "wait": lambda r: f"{r.num_waiting}",
        "prefill": lambda r: f"{r.num_prefill_tokens}",
        "decode": lambda r: f"{r.num_decode_tokens}",
        "again": lambda r: f"{r.num_recomputed_tokens}",
        "free": lambda r: f"{r.num_free_blocks}",
    }
)
DRAFTED = "drafted/accepted"  # column with speculative decoding
RANKS = "ranks: ms + communication"  # column with several ranks


def step_table(trace: Trace, last: int | None = 40) -> str:
    """The last steps (None: all), one line each: counts, then events. Columns for drafts and ranks
    are added if there are any."""
    records = trace[:] if last is None else trace[max(len(trace) - last, 0) :]
    columns = dict(COLUMNS)
    if any(record.drafted for record in records):
        columns[DRAFTED] = drafts
    if any(record.ranks for record in records):
        columns[RANKS] = ranks
    rows = [[*columns, "events"]]
    rows += [
        [*(column(record) for column in columns.values()), events(record)] for record in records
    ]
    widths = [max(len(row[place]) for row in rows) for place in range(len(columns))]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    ).rstrip()


def drafts(record: StepRecord) -> str:
    """Tokens drafted and accepted, over all rows."""
    if not record.drafted:
        return "-"
    drafted = sum(one.num_drafted for one in record.drafted)
    return f"{drafted}/{sum(one.num_accepted for one in record.drafted)}"


def ranks(record: StepRecord) -> str:
    """Milliseconds of each rank: computing + communicating or waiting."""
    return "  ".join(
        f"{(one.seconds - one.communicating) * 1e3:.1f}+{one.communicating * 1e3:.1f}"
        for one in record.ranks
    )


def events(record: StepRecord) -> str:
    """The events of a step, by sequence number."""
    parts = [
        ("new", [added.seq_id for added in record.added]),
        ("admitted", record.admitted),
        ("preempted", [f"{p.seq_id} for {p.for_seq_id} ({p.mode})" for p in record.preempted]),
        ("stalled", [f"{b.seq_id} ({b})" for b in record.stalled]),
        ("void", record.void),
        ("forked", [f"{f.seq_id} from {f.parent_id}" for f in record.forked]),
        ("ended", [f"{e.seq_id} ({e.reason})" for e in record.ended]),
    ]
    texts = [f"{name} {shortened(ids)}" for name, ids in parts if ids]
    if record.blocked is not None:
        texts.append(f"{record.blocked.seq_id} waits: {record.blocked}")
    return "; ".join(texts)


def shortened(ids: Any, most: int = 6) -> str:
    """The first `most` items of a list, and how many more there are."""
    more = f" and {len(ids) - most:,} more" if len(ids) > most else ""
    return ", ".join(map(str, ids[:most])) + more
