"""Exports a trace to Perfetto (ui.perfetto.dev) and chrome://tracing, in wall-clock time.

The format is Chrome's "Trace Event Format": complete events (ph "X", microseconds), counters ("C")
and names ("M"). One process has the engine's steps, another has one thread per sequence.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from minillm.lab.drawings.timeline import NAMES, timeline
from minillm.trace.recorder import Trace

Event = dict[str, Any]
ENGINE, SEQUENCES = 1, 2  # process ids
PARTS = ("plan", "run", "deliver")


def chrome_events(trace: Trace) -> list[Event]:
    """All events, ordered by time; names come first."""
    data = timeline(trace)
    events = [*step_events(data), *sequence_events(data)]
    return [*name_events(data), *sorted(events, key=lambda event: event["ts"])]


def save_chrome(trace: Trace, path: Path) -> None:
    """Write the events as a file that Perfetto opens."""
    result = {"traceEvents": chrome_events(trace), "displayTimeUnit": "ms"}
    path.write_text(json.dumps(result, separators=(",", ":")), "utf-8")


def name_events(data: dict[str, Any]) -> Iterator[Event]:
    """The names of processes and threads."""

    def name(what: str, pid: int, tid: int, text: str) -> Event:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": text}}

    yield name("process_name", ENGINE, 0, f"engine {data['meta']['model'] or ''}".strip())
    yield name("process_name", SEQUENCES, 0, "requests")
    yield name("thread_name", ENGINE, 0, "steps")
    for place, sequence in enumerate(data["sequences"]):
        yield name("thread_name", SEQUENCES, place, sequence["name"])


def step_events(data: dict[str, Any]) -> Iterator[Event]:
    """An event per step with its three parts nested, and counters at its start."""
    steps, names = data["steps"], ["prefill", "decode", "recomputed"]
    if any(steps["drafted"]):
        names += ["drafted", "accepted"]
    for column, step in enumerate(steps["step"]):
        start = microseconds(steps["start"][column])
        lengths = [microseconds(steps[part][column]) for part in PARTS]
        counts = {name: steps[name][column] for name in names}
        yield complete(f"step {step}", ENGINE, 0, start, sum(lengths), counts)
        at = start
        for part, length in zip(PARTS, lengths, strict=True):
            yield complete(part, ENGINE, 0, at, length, {})
            at += length
        queue = {name: steps[name][column] for name in ("running", "waiting")}
        yield {"ph": "C", "name": "sequences", "pid": ENGINE, "ts": start, "args": queue}
        yield {"ph": "C", "name": "tokens", "pid": ENGINE, "ts": start, "args": counts}
        free = {"free": steps["free"][column]}
        yield {"ph": "C", "name": "blocks", "pid": ENGINE, "ts": start, "args": free}


def sequence_events(data: dict[str, Any]) -> Iterator[Event]:
    """An event per span of every sequence, from the start of its first step."""
    steps = data["steps"]
    starts = [microseconds(start) for start in steps["start"]]
    ends = [
        start + sum(microseconds(steps[part][column]) for part in PARTS)
        for column, start in enumerate(starts)
    ]
    for place, sequence in enumerate(data["sequences"]):
        for kind, first, last, value, *rest in sequence["spans"]:
            args: Event = {"steps": last - first + 1}
            if kind in "wxos":
                args["why"] = data["reasons"][value]
            else:
                args |= {"position": value, "tokens": rest[0] if rest else last - first + 1}
                args |= draft_counts(sequence["drafts"], first, last)
            # A span ends where the next step starts, because time between steps counts, too.
            end = starts[last + 1] if last + 1 < len(starts) else ends[last]
            length = max(end, ends[last]) - starts[first]
            yield complete(NAMES[kind], SEQUENCES, place, starts[first], length, args)


def draft_counts(drafts: list[list[int]], first: int, last: int) -> dict[str, int]:
    """The numbers of drafted and accepted tokens in these columns; empty if none were drafted."""
    begin = bisect_left(drafts, first, key=itemgetter(0))
    counts = [draft[1:] for draft in drafts[begin : bisect_right(drafts, last, key=itemgetter(0))]]
    drafted, accepted = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    return {"drafted": drafted, "accepted": accepted} if drafted else {}


def complete(name: str, pid: int, tid: int, start: float, length: float, args: Event) -> Event:
    """An event with a start and a length, in microseconds."""
    return {
        "ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": length, "args": args
    }  # fmt: skip


def microseconds(seconds: float) -> float:
    """Microseconds, rounded to nanoseconds."""
    return round(seconds * 1e6, 3)
