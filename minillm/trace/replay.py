"""Replays a trace: rebuilds every block table and the times of every request from the records.

A record has only the changes of its step. Applying the records one by one gives the state after
each step; tests compare it with the scheduler's state.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from minillm.cache.manager import Count
from minillm.scheduling.plan import Row
from minillm.scheduling.record import Added, Drafted, Ended, Number, StepRecord

# The states of a sequence: waiting for its first admission; waiting after a preemption, with its
# blocks freed or swapped out; running.
WAITING, PREEMPTED, SWAPPED, RUNNING = "waiting", "preempted", "swapped", "running"


@dataclass(slots=True)
class SequenceState:
    """The state of one completion, from the records.

    `added` is the arrival of its request; None if that was before the first record. `first` is the
    first completion of its request, or None for the first itself, where `num_completions` counts
    the completions so far and `num_open` the unfinished ones. `furthest` is the number of positions
    computed at least once, `num_cached` the number of prompt tokens from the prefix cache. Times
    are on the engine's clock. A step with accepted drafts adds several tokens with the same time.
    """

    seq_id: Count
    added: Added | None = None
    index: Count = 0
    first: "SequenceState | None" = field(default=None, compare=False, repr=False)
    num_completions: Count = 1
    num_open: Count = 1
    where: str = WAITING
    blocks: list[Count] = field(default_factory=list)
    num_computed: Count = 0
    furthest: Count = 0
    num_cached: Count = 0
    num_recomputed: Count = 0
    num_preemptions: Count = 0
    num_tokens: Count = 0
    num_draft_tokens: Count = 0
    num_accepted_tokens: Count = 0
    scheduled: Number | None = None
    first_token: Number | None = None
    last_token: Number | None = None
    before_last_token: Number | None = None
    end: str | None = None
    ended: Number | None = None

    @property
    def request_id(self) -> str:
        """The id of its request, or "sequence N" if unknown."""
        return self.added.request_id if self.added else f"sequence {self.seq_id}"

    @property
    def name(self) -> str:
        """The request's id, with " #1", " #2", ... for further completions."""
        return f"{self.request_id} #{self.index}" if self.index else self.request_id

    def is_decode(self, row: Row) -> bool:
        """Whether a row is a decode row: the latest token, and drafts if any, with all logits."""
        prompt = self.added.num_prompt_tokens if self.added else 0
        return row.num_tokens == row.num_logits and row.start >= prompt


class ReplayedRow(NamedTuple):
    """A row and its results. Positions up to `end` are valid, and `num_recomputed` of them were
    computed before. `num_new` tokens were sampled (without forks), including `num_accepted` of
    `num_drafted` drafts; none if the row's results were discarded."""

    state: SequenceState
    row: Row
    end: int
    num_recomputed: int
    num_new: int
    num_drafted: int
    num_accepted: int

    @classmethod
    def of(
        cls, state: SequenceState, row: Row, drafted: Drafted | None, discarded: bool
    ) -> "ReplayedRow":
        """The results of a row; call it before the row's positions are counted as computed."""
        start, num_new, num_drafted, num_accepted = row.start, row.num_logits, 0, 0
        end = start + row.num_tokens
        if num_new > 1:  # most rows have no drafts; this runs for every row of a step
            num_drafted, num_accepted = (0, 0) if drafted is None else drafted[1:3]
            num_new = min(num_new, 1 + num_accepted)
            end = row.end_after(num_new)
        recomputed = max(min(end, state.furthest) - start, 0) if start < state.furthest else 0
        new = 0 if discarded else num_new
        return cls(state, row, end, recomputed, new, num_drafted, num_accepted)


@dataclass(slots=True)
class ReplayedStep:
    """The changes of a step: its rows, forked and ended sequences, tokens that failed (of this step
    or the previous one), and blocks whose holders changed."""

    rows: list[ReplayedRow] = field(default_factory=list)
    failed: list[tuple[SequenceState, int]] = field(default_factory=list)
    forked: list[SequenceState] = field(default_factory=list)
    ended: list[SequenceState] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)


class Replay:
    """The unfinished sequences after the applied records, and the holders of each block in use."""

    def __init__(self, states: Iterable[SequenceState] = ()) -> None:
        self.sequences = {state.seq_id: state for state in states}
        self.holders: dict[int, list[int]] = {}
        for state in self.sequences.values():
            for block in state.blocks:
                self.holders.setdefault(block, []).append(state.seq_id)

    def apply(self, record: StepRecord) -> ReplayedStep:
        """Apply the record of the next step; returns its changes."""
        step = ReplayedStep()
        for added in record.added:
            self.sequences[added.seq_id] = SequenceState(added.seq_id, added)
        for preemption in record.preempted:
            state = self.of(preemption.seq_id)
            state.where = SWAPPED if preemption.mode == "swap" else PREEMPTED
            state.num_preemptions += 1
            self._hold(state, 0, (), step)
        starts = {row.seq_id: row.start for row in record.rows}
        for seq_id in record.admitted:
            self._admit(self.of(seq_id), starts.get(seq_id, 0), record.planned)
        discarded = {one.seq_id for one in record.ended if one.discarded} | set(record.void)
        drafts = {drafted.seq_id: drafted for drafted in record.drafted}
        for row in record.rows:
            state = self.of(row.seq_id)
            state.where = RUNNING
            if row.blocks or row.num_kept < len(state.blocks):
                self._hold(state, row.num_kept, row.blocks, step)
            valid = row.seq_id not in discarded
            done = ReplayedRow.of(state, row, drafts.get(row.seq_id), not valid)
            step.rows.append(done)
            if valid:
                self._compute(done, record.computed)
        for drafted in record.drafted:  # blocks of rejected drafts are freed
            self._hold(self.of(drafted.seq_id), drafted.num_blocks, (), step)
        for seq_id in record.void:
            self._restart(self.of(seq_id), step)
        for seq_id, parent_id, index in record.forked:
            step.forked.append(self._fork(self.of(parent_id), seq_id, index, step))
        step.ended += [self._end(self.of(one.seq_id), one, record, step) for one in record.ended]
        return step

    def _hold(
        self, state: SequenceState, kept: int, blocks: Iterable[int], step: ReplayedStep
    ) -> None:
        """Set a block table to its first `kept` blocks followed by `blocks`."""
        gone, come = state.blocks[kept:], list(blocks)
        for block in gone:
            self.holders[block].remove(state.seq_id)
        state.blocks[kept:] = come
        for block in come:
            self.holders.setdefault(block, []).append(state.seq_id)
        step.blocks.update(gone, come)

    def _restart(self, state: SequenceState, step: ReplayedStep) -> None:
        state.where, state.num_computed = PREEMPTED, 0
        self._hold(state, 0, (), step)

    def of(self, seq_id: int) -> SequenceState:
        """The state of a sequence; a new one if its arrival was not recorded."""
        return self.sequences.setdefault(seq_id, SequenceState(seq_id))

    def _admit(self, state: SequenceState, start: int, time: float) -> None:
        if state.where == WAITING:
            state.num_cached = start
            state.scheduled = time
        state.furthest = max(state.furthest, start)

    def _compute(self, done: ReplayedRow, time: float) -> None:
        state = done.state
        state.num_recomputed += done.num_recomputed
        state.num_computed, state.furthest = done.end, max(state.furthest, done.end)
        state.num_draft_tokens += done.num_drafted
        state.num_accepted_tokens += done.num_accepted
        if done.num_new:
            state.num_tokens += done.num_new
            state.before_last_token, state.last_token = state.last_token, time
            state.first_token = time if state.first_token is None else state.first_token

    def _fork(
        self, parent: SequenceState, seq_id: int, index: int, step: ReplayedStep
    ) -> SequenceState:
        child = SequenceState(seq_id, parent.added, index, parent, where=RUNNING)
        self.sequences[seq_id] = child
        self._hold(child, 0, parent.blocks, step)
        parent.num_completions += 1
        parent.num_open += 1
        child.num_computed = child.furthest = parent.num_computed
        child.num_tokens, child.first_token = 1, parent.last_token
        child.last_token = parent.last_token
        return child

    def _end(
        self, state: SequenceState, ended: Ended, record: StepRecord, step: ReplayedStep
    ) -> SequenceState:
        if ended.num_tokens < state.num_tokens:  # the last sample failed
            step.failed.append((state, state.num_tokens - ended.num_tokens))
            state.last_token = state.before_last_token
            state.num_tokens = ended.num_tokens
            if not ended.num_tokens:
                state.first_token = None
        state.end = ended.reason
        state.ended = record.computed if ended.time is None else ended.time
        (state.first or state).num_open -= 1
        self._hold(state, 0, (), step)
        del self.sequences[state.seq_id]
        return state


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """The metrics of a finished request as in `RequestMetrics`, computed from records."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: tuple[int, ...]  # of each completion
    ends: tuple[str, ...]
    queue_time: float
    ttft: float | None
    tpot: float | None
    e2e: float
    num_cached_tokens: int
    num_recomputed_tokens: int
    num_preemptions: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


def summarize(states: list[SequenceState], added: Added) -> RequestSummary:
    """The summary of a request from the states of all its completions."""
    states = sorted(states, key=lambda state: state.index)
    ended = max(state.ended or 0.0 for state in states)
    begun = ended if states[0].scheduled is None else states[0].scheduled  # 0.0 is a valid time
    firsts = [state.first_token for state in states if state.first_token is not None]
    lasts = [state.last_token for state in states if state.last_token is not None]
    steps = max(state.num_tokens for state in states) - 1
    return RequestSummary(
        request_id=added.request_id,
        num_prompt_tokens=added.num_prompt_tokens,
        num_tokens=tuple(state.num_tokens for state in states),
        ends=tuple(str(state.end) for state in states),
        queue_time=begun - added.arrival,
        ttft=min(firsts) - added.arrival if firsts else None,
        tpot=(max(lasts) - min(firsts)) / steps if firsts and steps > 0 else None,
        e2e=ended - added.arrival,
        num_cached_tokens=states[0].num_cached,
        num_recomputed_tokens=sum(state.num_recomputed for state in states),
        num_preemptions=sum(state.num_preemptions for state in states),
        num_draft_tokens=sum(state.num_draft_tokens for state in states),
        num_accepted_tokens=sum(state.num_accepted_tokens for state in states),
    )


def finished_requests(replay: Replay, records: Iterable[StepRecord]) -> list[RequestSummary]:
    """Summaries of the requests whose arrival is known and whose completions all ended in these
    records, in the order of their ends."""
    ended: dict[int, list[SequenceState]] = {}  # by the seq_id of the first completion
    summaries = []
    for record in records:
        done = {}
        for state in replay.apply(record).ended:
            first = state.first or state
            ended.setdefault(first.seq_id, []).append(state)
            if not first.num_open:
                done[first.seq_id] = first
        for seq_id, first in done.items():
            together = ended.pop(seq_id)
            if first.added is not None and len(together) == first.num_completions:
                summaries.append(summarize(together, first.added))
    return summaries


def token_times(replay: Replay, records: Iterable[StepRecord]) -> dict[str, list[float]]:
    """The time of every new token in these records, by completion, without failed and discarded
    tokens. Tokens of the same step have the same time."""
    times: dict[str, list[float]] = {}
    for record in records:
        step = replay.apply(record)
        sampled = [(done.state, done.num_new) for done in step.rows if done.num_new]
        for state, num_new in (*sampled, *((state, 1) for state in step.forked)):
            times.setdefault(state.name, []).extend([record.computed] * num_new)
        for state, num_failed in step.failed:
            times[state.name] = times.get(state.name, [])[:-num_failed]
    return {name: known for name, known in times.items() if known}
