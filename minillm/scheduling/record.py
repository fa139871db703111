"""What a step did and why, for people: the raw material of traces, metrics and lessons.

A plan tells the runner what changed; a record tells everybody else. Each event of a request is in
exactly one record, so that whoever has all records can rebuild every block table, counter and time.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from minillm.cache.manager import BlockCopy
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.request import Sequence


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why a sequence could not go on: the next waiting one, behind which all others wait, or a
    running one that got no row.

    `what` it lacks is "seats" (of `max_num_seqs`), "tokens" (of the step's budget) or "blocks":
    for those who wait, none at all in a step in which those who run were short of them.
    """

    seq_id: int
    request_id: str
    what: str
    needed: int
    available: int

    @classmethod
    def of(cls, sequence: Sequence, what: str, needed: int, available: int) -> "Blocked":
        """The same about a given sequence."""
        return cls(sequence.seq_id, sequence.request.request_id, what, needed, available)

    def __str__(self) -> str:
        return f"no {self.what}: needs {self.needed}, has {max(self.available, 0)}"


class Added(NamedTuple):
    """A request came, and `seq_id` is its first sequence; `arrival` is on the engine's clock."""

    seq_id: int
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_completions: int
    priority: int
    arrival: float


class Preemption(NamedTuple):
    """Who lost its blocks, for whom, and whether they went to host memory ("swap") or not
    ("recompute")."""

    seq_id: int
    for_seq_id: int
    mode: str
    num_tokens: int  # that were computed so far


class Forked(NamedTuple):
    """Completion number `completion` of a request parted from the first, over the same blocks."""

    seq_id: int
    parent_id: int
    completion: int


class Drafted(NamedTuple):
    """`num_drafted` tokens were proposed for a row, of which the first `num_accepted` became tokens
    of the sequence, and a sampled one after them; it holds `num_blocks` blocks afterwards. What
    follows a stop is not accepted."""

    seq_id: int
    num_drafted: int
    num_accepted: int
    num_blocks: int


class RankTime(NamedTuple):
    """`seconds` that a rank took for a step, and those of them in which it was `communicating`: in
    sums and gathers, or waiting for the stage before."""

    rank: int
    seconds: float
    communicating: float


class Ended(NamedTuple):
    """A sequence ended, with `num_tokens` new tokens; `time` None means when the tokens of its step
    were there. `in_vain` says that its row of this step came to nothing."""

    seq_id: int
    reason: str
    num_tokens: int
    in_vain: bool
    time: float | None


@dataclass(slots=True)
class StepRecord:
    """One step, with all that happened between the step before and the step after.

    Times are in seconds on the clock of whoever drives the scheduler: the step `started`, was
    `planned`, its tokens were `computed` (the model ran, and samples were drawn), and texts and
    outputs were `delivered`. Token counts reconcile with the scheduler's counters.

    Attributes:
        added: requests that came since the step before.
        rows, copies, swap_out, swap_in: those of the plan.
        admitted: sequences that got their first blocks, or blocks again.
        preempted: sequences that lost theirs.
        stalled: running sequences that got no row, and why.
        blocked: the next waiting sequence and why it was not admitted; all others wait behind it.
        void: sequences whose row came to nothing, because one that it reads from failed.
        drafted: what became of the drafts of each row that may have had some.
        forked, ended: what the sampled tokens, or aborts until the next step, led to.
        num_running, num_waiting, num_free_blocks: when the step was planned.
        graph_rows, why_eager: rows of the CUDA graph that ran the step, or, where there are graphs,
            why none could.
        ranks: how long each rank took, where there are several.
    """

    step: int
    added: list[Added] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    stalled: list[Blocked] = field(default_factory=list)
    blocked: Blocked | None = None
    void: list[int] = field(default_factory=list)
    drafted: list[Drafted] = field(default_factory=list)
    forked: list[Forked] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    graph_rows: int = 0
    why_eager: str = ""
    ranks: list[RankTime] = field(default_factory=list)
    started: float = 0.0
    planned: float = 0.0
    computed: float = 0.0
    delivered: float = 0.0


@dataclass(slots=True)
class Counters:
    """Totals since the start. Tokens reused after a preemption are no prefix hits."""

    num_steps: int = 0
    num_mixed_steps: int = 0  # with prefill and decode
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0  # of admitted requests
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    max_num_running: int = 0
    num_drafts: int = 0  # rows with drafts
    num_draft_tokens: int = 0  # of these rows
    num_accepted_tokens: int = 0  # of these, that became tokens of a sequence
    num_accepted_at: list[int] = field(default_factory=list)  # by place among the drafts of a row

    def add(self, record: StepRecord) -> None:
        """A step was planned."""
        self.num_prefill_tokens += record.num_prefill_tokens
        self.num_decode_tokens += record.num_decode_tokens
        self.num_mixed_steps += bool(record.num_prefill_tokens and record.num_decode_tokens)
        self.max_num_running = max(self.max_num_running, record.num_running)

    def add_drafts(self, drafted: Drafted) -> None:
        """A row with drafts was committed."""
        self.num_drafts += drafted.num_drafted > 0
        self.num_draft_tokens += drafted.num_drafted
        self.num_accepted_tokens += drafted.num_accepted
        at = self.num_accepted_at
        at += [0] * (drafted.num_drafted - len(at))
        for place in range(drafted.num_accepted):
            at[place] += 1

    def cut_drafts(self, drafted: Drafted, num_cut: int) -> None:
        """The last `num_cut` accepted tokens of a committed row follow a stop."""
        self.num_accepted_tokens -= num_cut
        for place in range(drafted.num_accepted - num_cut, drafted.num_accepted):
            self.num_accepted_at[place] -= 1


class Logbook:
    """Sees to it that each event is in one record.

    What happens after a step belongs to its record; a request that came after it, and whatever
    became of it before the next step, belongs to the next. Where the next one was planned before
    the tokens of this one were there, what these lead to belongs to the next, too, with its time.
    """

    def __init__(self) -> None:
        self.record = StepRecord(0)
        self.time: float | None = None  # of the tokens of an earlier step, that are committed now
        self._added: dict[int, Added] = {}  # since the last step, by seq_id
        self._gone: list[Ended] = []  # of these
        # Rows with drafts since the last plan: their sequences, and the lists that they are in.
        self._verified: dict[int, tuple[Sequence, list[Drafted]]] = {}

    def begin(self, plan: StepPlan) -> None:
        """Open the record of a plan that is about to be filled; it sees the plan's own lists."""
        self.record = StepRecord(
            plan.step,
            list(self._added.values()),
            plan.rows,
            plan.copies,
            plan.swap_out,
            plan.swap_in,
            ended=self._gone,
        )
        self._added, self._gone, self._verified, self.time = {}, [], {}, None

    def add(self, sequence: Sequence) -> None:
        """A request came."""
        request = sequence.request
        self._added[sequence.seq_id] = Added(
            sequence.seq_id,
            request.request_id,
            len(request.prompt_token_ids),
            request.max_tokens,
            request.params.n,
            request.priority,
            request.arrival,
        )

    def end(self, sequence: Sequence, reason: str, in_vain: bool, time: float | None) -> None:
        """A sequence ended, wherever it was."""
        num_tokens = len(sequence.token_ids) - len(sequence.request.prompt_token_ids)
        ended = self._gone if sequence.seq_id in self._added else self.record.ended
        time = self.time if time is None else time
        ended.append(Ended(sequence.seq_id, reason, num_tokens, in_vain, time))

    def end_all(
        self, sequences: Iterable[Sequence], reason: str, in_flight: Container[int], time: float
    ) -> None:
        """The scheduler was interrupted anywhere, also here: end those that have not ended."""
        done = {one.seq_id for one in (*self.record.ended, *self._gone)}
        for sequence in sequences:
            if sequence.seq_id not in done:
                self.end(sequence, reason, sequence.seq_id in in_flight, time)
        if self.record.ended is self._gone:  # in the middle of `begin`
            self._added, self._gone = {}, []

    def draft(
        self, record: StepRecord, sequence: Sequence, drafted: Drafted, counters: Counters
    ) -> None:
        """A row with drafts was committed; `record` is that of its step."""
        record.drafted.append(drafted)
        counters.add_drafts(drafted)
        sequence.num_draft_tokens += drafted.num_drafted
        sequence.num_accepted_tokens += drafted.num_accepted
        self._verified[sequence.seq_id] = sequence, record.drafted

    def cut(self, seq_id: int, num_cut: int, counters: Counters) -> None:
        """The last `num_cut` tokens of a committed row follow a stop: none of them was accepted."""
        if not num_cut:
            return
        sequence, rows = self._verified.pop(seq_id)
        place = next(place for place, one in enumerate(rows) if one.seq_id == seq_id)
        counters.cut_drafts(rows[place], num_cut)
        sequence.num_accepted_tokens -= num_cut
        rows[place] = rows[place]._replace(num_accepted=rows[place].num_accepted - num_cut)

    def correct(self, seq_id: int, reason: str, num_cut: int = 0) -> None:
        """Its text ended with the last token by count, or `num_cut` tokens before."""
        ended = self.record.ended
        for place, one in enumerate(ended):
            if one.seq_id == seq_id:
                num_tokens = one.num_tokens - num_cut
                ended[place] = one._replace(reason=reason, num_tokens=num_tokens)
