"""Step records: what each step did and why, for traces, metrics and the course.

Every event of a request is in exactly one record. All block tables, counters and times can be
rebuilt from the complete sequence of records.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from minillm.cache.manager import BlockCopy, Count
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.request import Sequence

Number = Annotated[float, Meta(gt=-1e15, lt=1e15)]  # of seconds


class Blocked(NamedTuple):
    """Why the first waiting sequence was not admitted, or a running one got no row.

    `what` it lacks: "batch slots" (of `max_num_seqs`), "tokens" (of the step's budget) or "blocks".
    `available` blocks are 0 for a waiting sequence if running sequences lacked blocks in this step.
    """

    seq_id: Count
    request_id: str
    what: str
    needed: Count
    available: Annotated[int, Meta(gt=-(2**31), lt=2**31)]

    @classmethod
    def of(cls, sequence: Sequence, what: str, needed: int, available: int) -> "Blocked":
        """A `Blocked` for this sequence."""
        return cls(sequence.seq_id, sequence.request.request_id, what, needed, available)

    def __str__(self) -> str:
        return f"no {self.what}: needs {self.needed}, has {max(self.available, 0)}"


class Added(NamedTuple):
    """A request arrived; `seq_id` is its first sequence, `arrival` is on the engine's clock."""

    seq_id: Count
    request_id: str
    num_prompt_tokens: Count
    max_tokens: Count
    num_completions: Count
    priority: Annotated[int, Meta(gt=-(10**15), lt=10**15)]
    arrival: Number


class Preemption(NamedTuple):
    """Sequence `seq_id` lost its blocks to `for_seq_id`; `mode` is "swap" or "recompute"."""

    seq_id: Count
    for_seq_id: Count
    mode: str
    num_tokens: Count  # committed positions that it lost


class Forked(NamedTuple):
    """Completion `completion` of a request forked from sequence `parent_id`."""

    seq_id: Count
    parent_id: Count
    completion: Count


class Drafted(NamedTuple):
    """A row with speculative decoding: `num_accepted` of `num_drafted` tokens were accepted.

    Tokens behind a stop token or stop string do not count. Afterwards the block table has
    `num_blocks` blocks.
    """

    seq_id: Count
    num_drafted: Count
    num_accepted: Count
    num_blocks: Count


class RankTime(NamedTuple):
    """`seconds` that a rank took for a step; `communicating` of these were spent in collectives, or
    waiting for the previous pipeline stage."""

    rank: Count
    seconds: Number
    communicating: Number


class Ended(NamedTuple):
    """A sequence finished with `num_tokens` new tokens.

    `discarded`: it had a row in flight, whose tokens are discarded. `time` None: it finished when
    the tokens of its step were computed.
    """

    seq_id: Count
    reason: str
    num_tokens: Count
    discarded: bool
    time: Number | None


class StepRecord(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One step, and the events up to the next one.

    The engine sets four times in seconds of its clock: the step `started`; its plan was `planned`;
    its tokens were `computed` (forward pass and sampling); its outputs were `delivered`. Token
    counts add up to the scheduler's counters.

    Attributes:
        added: requests that arrived since the last step.
        rows, copies, swap_out, swap_in: as in the plan.
        admitted: sequences that entered the running set, new or resumed.
        preempted: sequences that lost their blocks.
        stalled: running sequences without a row, and why.
        blocked: the first waiting sequence that was not admitted, and why; those behind it wait.
        void: sequences whose row was discarded, because it read blocks of a failed row.
        drafted: rows with speculative decoding.
        forked, ended: due to the sampled tokens, or to aborts before the next step.
        num_running, num_waiting, num_free_blocks: when the step was planned.
        graph_rows: rows of the CUDA graph that ran the step; 0 for eager mode.
        why_eager: with CUDA graphs enabled, why the step ran in eager mode.
        ranks: time of each rank, if there are several.
    """

    step: Count
    added: list[Added] = []
    rows: list[Row] = []
    copies: list[BlockCopy] = []
    swap_out: list[BlockCopy] = []
    swap_in: list[BlockCopy] = []
    admitted: list[Count] = []
    preempted: list[Preemption] = []
    stalled: list[Blocked] = []
    blocked: Blocked | None = None
    void: list[Count] = []
    drafted: list[Drafted] = []
    forked: list[Forked] = []
    ended: list[Ended] = []
    num_prefill_tokens: Count = 0
    num_decode_tokens: Count = 0
    num_recomputed_tokens: Count = 0
    num_running: Count = 0
    num_waiting: Count = 0
    num_free_blocks: Count = 0
    graph_rows: Count = 0
    why_eager: str = ""
    ranks: list[RankTime] = []
    started: Number = 0.0
    planned: Number = 0.0
    computed: Number = 0.0
    delivered: Number = 0.0


@dataclass(slots=True)
class Counters:
    """Totals since the start, or over an interval (`since`).

    Prefix hits of a preempted sequence do not count as cached tokens. A row with drafts yields its
    accepted drafts and one sampled token. Tokens behind a stop token or stop string are discarded
    and do not count; the last token that remains counts as the sampled one.
    """

    num_steps: int = 0
    num_mixed_steps: int = 0  # with prefill and decode rows
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0  # of requests, at their first admission
    num_cached_tokens: int = 0  # of these, hits in the prefix cache
    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    max_num_running: int = 0
    num_drafts: int = 0  # rows with drafts
    num_draft_tokens: int = 0  # drafted tokens of these rows
    num_accepted_tokens: int = 0  # of these, accepted
    num_accepted_at: list[int] = field(default_factory=list)  # by draft position in the row

    def add(self, record: StepRecord) -> None:
        """Add a planned step."""
        self.num_prefill_tokens += record.num_prefill_tokens
        self.num_decode_tokens += record.num_decode_tokens
        self.num_mixed_steps += bool(record.num_prefill_tokens and record.num_decode_tokens)
        self.max_num_running = max(self.max_num_running, record.num_running)

    def add_drafts(self, drafted: Drafted) -> None:
        """Add a committed row with drafts."""
        self.num_drafts += drafted.num_drafted > 0
        self.num_draft_tokens += drafted.num_drafted
        self.num_accepted_tokens += drafted.num_accepted
        at = self.num_accepted_at
        at += [0] * (drafted.num_drafted - len(at))
        for place in range(drafted.num_accepted):
            at[place] += 1

    def cut_drafts(self, drafted: Drafted, num_cut: int) -> None:
        """Uncount the last `num_cut` accepted tokens of a committed row: they are behind a stop."""
        self.num_accepted_tokens -= num_cut
        for place in range(drafted.num_accepted - num_cut, drafted.num_accepted):
            self.num_accepted_at[place] -= 1

    def plus(self, other: "Counters", sign: int = 1) -> "Counters":
        """The sum of each of the totals, also of `max_num_running`."""
        made = Counters()
        for name in (item.name for item in fields(self)):
            mine, others = getattr(self, name), getattr(other, name)
            if name == "num_accepted_at":
                pairs = zip_longest(mine, others, fillvalue=0)
                total = [one + sign * addend for one, addend in pairs]
            else:
                total = mine + sign * others
            setattr(made, name, total)
        return made

    def since(self, before: "Counters") -> "Counters":
        """What was counted after `before`."""
        return self.plus(before, -1)

    @property
    def mean_length(self) -> float:
        """Mean acceptance length, 1 + accepted / drafts: mean tokens per row with drafts."""
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1)

    @property
    def rate(self) -> float | None:
        """Share of drafted tokens that were accepted; None if there are none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def rates_at(self) -> tuple[float, ...]:
        """Acceptance rate by draft position: the share of rows with drafts in which this draft, and
        so all before it, was accepted."""
        return tuple(count / max(self.num_drafts, 1) for count in self.num_accepted_at)


class Logbook:
    """Writes each event into exactly one record.

    After a step is planned, events go into its record until the next step is planned. Events of a
    request that arrives in between go into the record of the next step. If step n + 1 is planned
    before step n is committed, events of this commit go into record n + 1; `Ended.time` says when
    the tokens of step n were computed.
    """

    def __init__(self) -> None:
        self.record = StepRecord(0)
        self._added: dict[int, Added] = {}  # requests since the last plan, by seq_id
        self._gone: list[Ended] = []  # of these, finished ones
        # seq_id -> sequence and `StepRecord.drafted`, for rows committed since the last plan.
        self._verified: dict[int, tuple[Sequence, list[Drafted]]] = {}

    def begin(self, plan: StepPlan) -> None:
        """Open the record of an empty plan; the two share their lists."""
        self.record = StepRecord(
            plan.step,
            list(self._added.values()),
            plan.rows,
            plan.copies,
            plan.swap_out,
            plan.swap_in,
            ended=self._gone,
        )
        self._added, self._gone, self._verified = {}, [], {}

    def add(self, sequence: Sequence) -> None:
        """Record the arrival of a request."""
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

    def end(self, sequence: Sequence, reason: str, discarded: bool, time: float | None) -> None:
        """Record that a sequence finished."""
        num_tokens = len(sequence.token_ids) - len(sequence.request.prompt_token_ids)
        ended = self._gone if sequence.seq_id in self._added else self.record.ended
        ended.append(Ended(sequence.seq_id, reason, num_tokens, discarded, time))

    def end_all(
        self, sequences: Iterable[Sequence], reason: str, in_flight: Container[int], time: float
    ) -> None:
        """Record the end of all unfinished sequences, after an interrupt at any point."""
        done = {one.seq_id for one in (*self.record.ended, *self._gone)}
        for sequence in sequences:
            if sequence.seq_id not in done:
                self.end(sequence, reason, sequence.seq_id in in_flight, time)
        if self.record.ended is self._gone:  # interrupted inside `begin`
            self._added, self._gone = {}, []

    def draft(
        self, record: StepRecord, sequence: Sequence, drafted: Drafted, counters: Counters
    ) -> None:
        """Record a committed row with drafts; `record` is that of its step."""
        record.drafted.append(drafted)
        counters.add_drafts(drafted)
        sequence.num_draft_tokens += drafted.num_drafted
        sequence.num_accepted_tokens += drafted.num_accepted
        self._verified[sequence.seq_id] = sequence, record.drafted

    def cut(self, seq_id: int, num_cut: int, counters: Counters) -> None:
        """Count the last `num_cut` tokens of a committed row as rejected (behind a stop)."""
        if not num_cut:
            return
        sequence, rows = self._verified.pop(seq_id)
        place = next(place for place, one in enumerate(rows) if one.seq_id == seq_id)
        counters.cut_drafts(rows[place], num_cut)
        sequence.num_accepted_tokens -= num_cut
        rows[place] = rows[place]._replace(num_accepted=rows[place].num_accepted - num_cut)

    def correct(self, seq_id: int, reason: str, num_cut: int = 0) -> None:
        """Correct the record of a finished sequence: its text stopped, `num_cut` tokens earlier."""
        ended = self.record.ended
        for place, one in enumerate(ended):
            if one.seq_id == seq_id:
                num_tokens = one.num_tokens - num_cut
                ended[place] = one._replace(reason=reason, num_tokens=num_tokens)
