"""The timeline of a trace: the state of each sequence in each step, and the holders of each block.

All drawings (page, widget, figure) are made from this timeline, which is plain JSON data.
A column is a recorded step; a sequence is a list of spans:

    kind   state in these columns                            values
    "w"    waiting for its first admission                   reason (index in `reasons`)
    "x"    preempted, without blocks                         reason
    "o"    swapped out to host memory                        reason
    "s"    running, but not scheduled in this step           reason
    "p"    prefill, one span per step                        first position, number of tokens
    "r"    prefill with recomputed positions                 first position, number of tokens
    "d"    decode, one token per step                        first position

The drafts of a sequence are a separate list of (column, number drafted, number accepted). A step
with accepted drafts ends its "d" span, so that in a span the position increases by 1 per column.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from minillm.scheduling.record import Blocked, StepRecord
from minillm.trace.recorder import Trace, TraceSettings
from minillm.trace.replay import (
    PREEMPTED,
    RUNNING,
    SWAPPED,
    WAITING,
    Replay,
    ReplayedRow,
    SequenceState,
)

WAITING_KINDS: Mapping[str, str] = MappingProxyType({WAITING: "w", PREEMPTED: "x", SWAPPED: "o"})
BEHIND = "behind the head of the queue"
NOT_YET = "planned before its last tokens were known"
# Names of the kinds of spans in drawings.
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "w": "waiting",
        "x": "preempted",
        "o": "swapped out",
        "s": "stalled",
        "p": "prefill",
        "r": "recomputed",
        "d": "decode",
    }
)


def timeline(trace: Trace) -> dict[str, Any]:
    """The timeline of a trace: meta, steps (lists of numbers), sequences, reasons, blocks, ranks.

    Its size grows with the number of changes, not with steps times sequences.
    """
    replay, records = trace.snapshot()
    zero = records[0].started if records else 0.0
    builder = TimelineBuilder(replay, trace.settings.num_blocks, zero)
    for column, record in enumerate(records):
        builder.add(column, record)
    builder.close(len(records))
    return {
        "meta": meta(trace.settings, zero) | {"num_dropped": trace.num_dropped},
        "steps": columns(records, zero) | {"blocked": builder.blocked},
        "sequences": builder.sequences,
        "reasons": list(builder.reasons),
        "blocks": builder.blocks,
        "ranks": rank_lanes(records),
    }


def meta(settings: TraceSettings, zero: float) -> dict[str, Any]:
    """The settings of the engine, and its start time."""
    values = asdict(settings)
    clock, wall = values.pop("clock"), values.pop("wall")
    return values | {"started": None if clock is None or wall is None else wall + zero - clock}


def columns(records: list[StepRecord], zero: float) -> dict[str, list[Any]]:
    """The curves. Parts that an interrupted step did not reach take 0 s."""
    return {
        "step": [r.step for r in records],
        "start": [r.started - zero for r in records],
        "plan": [max(r.planned - r.started, 0.0) for r in records],
        "run": [max(r.computed - r.planned, 0.0) for r in records],
        "deliver": [max(r.delivered - r.computed, 0.0) for r in records],
        "prefill": [r.num_prefill_tokens for r in records],
        "decode": [r.num_decode_tokens for r in records],
        "recomputed": [r.num_recomputed_tokens for r in records],
        "running": [r.num_running for r in records],
        "waiting": [r.num_waiting for r in records],
        "free": [r.num_free_blocks for r in records],
        "drafted": [sum(one.num_drafted for one in r.drafted) for r in records],
        "accepted": [sum(one.num_accepted for one in r.drafted) for r in records],
        "copies": [len(r.copies) for r in records],
        "swapped_out": [len(r.swap_out) for r in records],
        "swapped_in": [len(r.swap_in) for r in records],
    }


def rank_lanes(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """For each rank its `rank`, and lists of seconds `computing` and `communicating` per step.

    Communication includes waiting for other ranks. A step without rank times, such as an
    interrupted one, has 0 seconds. The list is empty if there are fewer than two ranks.
    """
    number = max((rank.rank + 1 for record in records for rank in record.ranks), default=0)
    if number < 2:
        return []
    lanes = [{name: [0.0] * len(records) for name in ("computing", "communicating")}
             for _ in range(number)]  # fmt: skip
    for column, record in enumerate(records):
        for rank in record.ranks:
            lane = lanes[rank.rank]
            lane["computing"][column] = max(rank.seconds - rank.communicating, 0.0)
            lane["communicating"][column] = rank.communicating
    return [{"rank": rank} | lane for rank, lane in enumerate(lanes)]


class TimelineBuilder:
    """Builds a timeline step by step. The work per step is that of its changes and rows."""

    def __init__(self, replay: Replay, num_blocks: int, zero: float):
        self.sequences: list[dict[str, Any]] = []
        self.reasons: dict[str, int] = {}
        self.blocked: list[list[int]] = []  # first and last column, sequence, reason
        self.blocks: list[list[Any]] = [[] for _ in range(num_blocks)]
        self._zero = zero
        self._replay = replay
        self._places: dict[int, int] = {}  # seq_id -> index in `sequences`
        self._open: dict[int, list[Any]] = {}  # the current span of each unfinished sequence
        self._rows: dict[int, int] = {}  # the last column with a row of each unfinished sequence
        self._explained: list[int] = []  # sequences with their own reason in the latest step
        for state in self._replay.sequences.values():
            self._enter(state, 0)
            if state.where != RUNNING:
                self._wait(0, state, BEHIND)
        for block in self._replay.holders:
            self._draw_block(0, block)

    def add(self, column: int, record: StepRecord) -> None:
        """Add the next step."""
        step = self._replay.apply(record)
        states = ChainMap({state.seq_id: state for state in step.ended}, self._replay.sequences)
        for added in record.added:
            self._wait(column, states[added.seq_id], BEHIND)
        for done in step.rows:
            self._draw_row(column, done)
        self._draw_reasons(column, record, states)
        for state in step.forked:
            self._enter(state, column)
            span = self._open.get(state.first.seq_id) if state.first else None
            if span is not None:  # a fork starts in the span of its parent
                self._open[state.seq_id] = list(span)
                self._rows[state.seq_id] = column
        for state in step.ended:
            if state.seq_id not in self._places:  # Ctrl-C before its arrival was recorded
                continue
            line = self.sequences[self._places[state.seq_id]]
            line |= {"end": state.end, "ended": column, "preemptions": state.num_preemptions}
            self._close(state.seq_id, column)
            del self._places[state.seq_id]
            self._rows.pop(state.seq_id, None)
        for block in step.blocks:
            self._draw_block(column, block)

    def close(self, num_columns: int) -> None:
        """Extend the spans of unfinished sequences to the last column."""
        for state in self._replay.sequences.values():
            if state.seq_id in self._places:
                line = self.sequences[self._places[state.seq_id]]
                line["preemptions"] = state.num_preemptions
                self._close(state.seq_id, num_columns - 1)

    def _draw_row(self, column: int, done: ReplayedRow) -> None:
        state, row, recomputed = done.state, done.row, done.num_recomputed
        self._skip(column, state.seq_id)
        if state.is_decode(row) and not recomputed:
            self._set(column, state, "d", row.start)
        else:
            self._set(column, state, "r" if recomputed else "p", row.start, row.num_tokens)
        if row.seq_id in self._places:
            line = self.sequences[self._places[row.seq_id]]
            line["cached"] = state.num_cached
            if done.num_drafted:
                line["drafts"].append([column, done.num_drafted, done.num_accepted])

    def _skip(self, column: int, seq_id: int) -> None:
        """Add a stalled span for the columns between a sequence's last row and this one."""
        last, span = self._rows.get(seq_id, column), self._open.get(seq_id)
        if span is not None and span[0] in "pdr" and span[1] <= last < column - 1:
            self._close(seq_id, last)
            self._open[seq_id] = ["s", last + 1, last + 1, self._why(NOT_YET)]
        self._rows[seq_id] = column

    def _draw_reasons(
        self, column: int, record: StepRecord, states: Mapping[int, SequenceState]
    ) -> None:
        """Set the reasons of sequences without a row. A sequence's own reason lasts one step."""
        for seq_id in self._explained:
            if seq_id in states and states[seq_id].where != RUNNING:
                self._wait(column, states[seq_id], BEHIND)
        self._explained = []
        for preemption in record.preempted:
            winner = states.get(preemption.for_seq_id)
            name = winner.name if winner else f"sequence {preemption.for_seq_id}"
            self._explain(column, states[preemption.seq_id], f"preempted for {name}")
        for seq_id in record.void:
            self._explain(column, states[seq_id], "it read from a row that failed")
        for blocked in record.stalled:
            if blocked.seq_id in states:
                self._set(column, states[blocked.seq_id], "s", self._why(str(blocked)))
        if record.blocked is not None and record.blocked.seq_id in states:
            self._draw_blocked(column, record.blocked, states[record.blocked.seq_id])

    def _draw_blocked(self, column: int, blocked: Blocked, state: SequenceState) -> None:
        if state.seq_id not in self._explained:  # not preempted in this step
            self._explain(column, state, str(blocked))
        refusal = [self._places[state.seq_id], self._why(str(blocked))]
        if self.blocked and self.blocked[-1][1] == column - 1 and self.blocked[-1][2:] == refusal:
            self.blocked[-1][1] = column
        else:
            self.blocked.append([column, column, *refusal])

    def _explain(self, column: int, state: SequenceState, reason: str) -> None:
        self._wait(column, state, reason)
        self._explained.append(state.seq_id)

    def _wait(self, column: int, state: SequenceState, reason: str) -> None:
        self._set(column, state, WAITING_KINDS.get(state.where, "w"), self._why(reason))

    def _why(self, reason: str) -> int:
        return self.reasons.setdefault(reason, len(self.reasons))

    # ---- spans -----------------------------------------------------------------------------

    def _set(self, column: int, state: SequenceState, kind: str, *values: int) -> None:
        """Start a span at this column, and close the previous one; no change if they continue."""
        seq_id = state.seq_id
        if seq_id not in self._places:
            self._enter(state, column)
        span = self._open.get(seq_id)
        if span is not None:
            moved = column - span[1] if kind == "d" else 0
            if [kind, *values] == [span[0], span[3] + moved]:
                return
            self._close(seq_id, column - 1)
        self._open[seq_id] = [kind, column, column, *values]

    def _close(self, seq_id: int, column: int) -> None:
        span = self._open.pop(seq_id, None)
        if span is not None and span[1] <= column:  # a span replaced in its own column is dropped
            span[2] = column
            self.sequences[self._places[seq_id]]["spans"].append(span)

    def _enter(self, state: SequenceState, column: int) -> None:
        """Add a sequence to `sequences`."""
        added = state.added
        self._places[state.seq_id] = len(self.sequences)
        self.sequences.append(
            {
                "id": state.seq_id,
                "name": state.name,
                "prompt": added.num_prompt_tokens if added else None,
                "max": added.max_tokens if added else None,
                "n": added.num_completions if added else 1,
                "priority": added.priority if added else 0,
                "arrival": added.arrival - self._zero if added else None,
                "added": column,
                "ended": None,
                "end": None,
                "cached": state.num_cached,
                "preemptions": state.num_preemptions,
                "parent": self._places.get(state.first.seq_id) if state.first else None,
                "spans": [],
                "drafts": [],
            }
        )

    # ---- blocks ----------------------------------------------------------------------------

    def _draw_block(self, column: int, block: int) -> None:
        """Record the holders of a block at the end of this column."""
        holders = [self._places[seq_id] for seq_id in self._replay.holders.get(block, ())]
        while len(self.blocks) <= block:  # the settings of a simulation may have no num_blocks
            self.blocks.append([])
        changes = self.blocks[block]
        if changes and changes[-1][0] == column:
            changes.pop()
        if holders != (changes[-1][1] if changes else []):
            changes.append([column, holders])
