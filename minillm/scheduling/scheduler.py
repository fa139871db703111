"""The scheduler: one token budget per step, spent on running sequences first, then on waiting ones.

              add                 admit                    last token, stop, abort
    request ------>  waiting  ------------->  running  ------------------------->  finished
                        ^                        |
                        +------- preempt --------+      blocks given back, or moved to host memory

There is no prefill phase and no decode phase: a step computes, for each sequence that it takes, the
next tokens whose keys and values are missing. `schedule` plans by counts alone, `commit` tells what
was sampled. What a plan holds stays held until its commit, whatever is aborted between.
"""

from collections.abc import Collection, Mapping
from itertools import count

from minillm.cache.blocks import AccountingError
from minillm.cache.manager import BlockManager
from minillm.cache.prefix import Match
from minillm.errors import InvalidRequestError
from minillm.scheduling.admission import Admission
from minillm.scheduling.ahead import Flights
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.doubt import distrust
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.limits import check_fits
from minillm.scheduling.line import enter, leave
from minillm.scheduling.pipelined import in_turn, look_beyond, most_decoding
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.policies import POLICIES, Policy
from minillm.scheduling.record import Blocked, Counters, Forked, Logbook, Preemption, StepRecord
from minillm.scheduling.request import Key, Request, Sequence, Status
from minillm.scheduling.rows import Sampled, accept, next_row, put_in_order, why_stalled


class Scheduler:
    """Decides in every step who computes how many tokens, and in which blocks.

    `running` and `waiting` are sorted by the policy's keys. `record` explains the last step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        policy: Policy | None = None,
        drafts: Drafts | None = None,
    ):
        self.config, self.blocks, self.drafts = config, blocks, drafts
        self.policy = policy or POLICIES[config.policy]
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.sequences: dict[int, Sequence] = {}  # all that are not finished, by seq_id
        self.log, self.counters = Logbook(), Counters()
        self.admission = Admission(config, blocks, self.policy)
        self._requests: dict[str, list[Sequence]] = {}
        self._num_arrivals, self.seq_ids = 0, count()
        self.num_seats = 0  # taken by the running sequences and their forks to come
        self._dropped: list[int] = []
        self._readers: set[int] = set()  # those whose prefix is computed in the step being planned
        self._flights = Flights()
        self.in_flight = self._flights.sequences  # rows of plans that are not committed

    @property
    def record(self) -> StepRecord:
        """What the last step did and why."""
        return self.log.record

    # ---- requests ------------------------------------------------------------------------

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id is not finished."""
        return request_id in self._requests

    def add(self, request: Request) -> Sequence:
        """Put a request in line.

        Raises:
            InvalidRequestError: it could never run, and the sentence says by how much.
        """
        if self.knows(request.request_id):
            raise InvalidRequestError(
                f"There is an unfinished request with the id {request.request_id!r} already."
            )
        check_fits(request, self.config, self.blocks)
        key = self.policy.key(request, self._num_arrivals, 0)
        sequence = self._new_sequence(request, 0, self._num_arrivals, key)
        self._num_arrivals += 1
        self._requests[request.request_id] = [sequence]
        enter(self.waiting, sequence)
        self.log.add(sequence)
        return sequence

    def abort(self, request_id: str, reason: str = "abort", time: float | None = None) -> None:
        """End all sequences of a request, wherever they are. Unknown or finished is fine."""
        for sequence in list(self._requests.get(request_id, ())):
            self.finish(sequence.seq_id, reason, time)

    def finish(
        self, seq_id: int, reason: str = "stop", time: float | None = None, num_cut: int = 0
    ) -> None:
        """End one sequence: its text is complete, or it failed. Twice is fine.

        Its blocks are free at once, or, if a plan that is not committed uses them, at the commit.
        The rest is for the record: None is the time of the step's tokens, and the last `num_cut`
        tokens come after the end of its text.
        """
        self.log.cut(seq_id, num_cut, self.counters)
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            if reason != "length":
                self.log.correct(seq_id, reason, num_cut)
            return
        del sequence.token_ids[len(sequence.token_ids) - num_cut :]
        self.log.end(sequence, reason, seq_id in self.in_flight, time)
        del self.sequences[seq_id]
        if sequence.status is Status.RUNNING:
            self._stop_running(sequence)
        else:
            leave(self.waiting, sequence)
        sequence.status = Status.FINISHED
        if seq_id not in self.in_flight:
            self.blocks.release(sequence.table)
        others = self._requests[sequence.request.request_id]
        others.remove(sequence)
        if not others:
            del self._requests[sequence.request.request_id]

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished."""
        return bool(self.sequences)

    def restarted(self) -> "Scheduler":
        """One with the same limits, for when this one's books may be torn: it knows of no block
        and no request. Numbers and counters go on, so that a trace tells the two apart."""
        scheduler = Scheduler(self.config, self.blocks.emptied(), self.policy, self.drafts)
        scheduler.log, scheduler.counters = self.log, self.counters
        scheduler.seq_ids, scheduler._num_arrivals = self.seq_ids, self._num_arrivals
        return scheduler

    # ---- one step: plan ------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide the next step. Every plan must be committed before the next one is made."""
        if self.in_flight:
            raise AccountingError("The last plan was not committed.")
        self._flights.plans.clear()
        return self._plan()

    def schedule_ahead(self) -> StepPlan | None:
        """A step before a commit, where `ahead.py` or `pipelined.py` lets it be made."""
        may = look_beyond(self._flights, self.running, self.blocks, self.config, self.drafts)
        return self._plan() if may else None

    def _plan(self) -> StepPlan:
        self.counters.num_steps += 1
        plan, self._dropped = StepPlan(self.counters.num_steps, dropped=self._dropped), []
        self.log.begin(plan)
        self._flights.plans.append((plan, self.record))
        budget = self._take_running(plan, self.config.max_num_batched_tokens)
        if self.waiting:
            self.record.blocked = self._refusal(budget)
            if self.record.blocked is None:
                self._admit(plan, budget)
        if self.drafts is not None:
            self.drafts.watch(self.record)
            self.drafts.extend(plan, self.in_flight, len(self.running), self.blocks, self.config)
        put_in_order(plan.rows, self._readers)
        self._readers.clear()
        record = self.record
        record.num_running, record.num_waiting = len(self.running), len(self.waiting)
        record.num_free_blocks = self.blocks.pool.num_free
        self.counters.add(record)
        return plan

    def _take_running(self, plan: StepPlan, budget: int) -> int:
        """Rows for running sequences, decoding ones first; returns the budget that is left.

        `max_num_seqs` is at most the budget, so no arrival and no long prompt delays a decode."""
        most = most_decoding(len(self.running), self.config)
        for sequence in in_turn(self.running, self.config):
            if sequence.status is not Status.RUNNING or sequence.awaits_commit:
                continue  # preempted for one before it, or not to be planned ahead
            if len(plan.rows) >= most and sequence.num_uncomputed == 1:
                continue  # another plan's
            num_tokens = self._make_room(sequence, self._chunk(sequence, budget), plan)
            if num_tokens:
                self._add_row(plan, sequence, num_tokens)
                budget -= num_tokens
            else:
                self.record.stalled.append(why_stalled(sequence, budget, self.blocks))
        return budget

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Tokens of this sequence to compute now."""
        wanted = min(sequence.num_uncomputed, budget)
        limit = self.config.long_prefill_token_threshold if wanted > 1 else 0
        return min(wanted, limit) if limit else wanted

    def _make_room(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> int:
        """Preempt from the end of the order until the blocks suffice; returns for how many tokens
        they do.

        Only those behind `sequence` that are not in this step yet can be preempted. If that is
        not enough it computes what there is room for, or waits, with its blocks, for those that
        are in the step. So the first in the order advances, or everything that advances holds
        what it needs.
        """
        start, pool = sequence.num_computed, self.blocks.pool
        if not num_tokens or pool.num_free > num_tokens:  # a block per token and a copy: never more
            return num_tokens
        # Counted anew each time: a victim that shared the last block spares the copy.
        while self.blocks.num_needed(sequence.table, start, start + num_tokens) > pool.num_free:
            victim = self._victim(sequence)
            if victim is None:
                return min(num_tokens, self.blocks.num_writable(sequence.table, start))
            self._preempt(victim, sequence, plan)
        return num_tokens

    def _victim(self, sequence: Sequence) -> Sequence | None:
        for other in reversed(self.running):
            if other is sequence:
                return None
            if other.seq_id not in self.in_flight:
                return other
        return None

    def _preempt(self, victim: Sequence, winner: Sequence, plan: StepPlan) -> None:
        """Take a sequence's blocks away; it goes back in line with its old key."""
        self._stop_running(victim)
        mode = self.config.preemption_mode
        if mode == "swap" and not self.blocks.can_swap_out(victim.table):
            mode = "recompute"  # host memory is full
        lost = Preemption(victim.seq_id, winner.seq_id, mode, victim.num_certain)
        self.record.preempted.append(lost)
        if mode == "swap":
            plan.swap_out += self.blocks.swap_out(victim.table)
            self.counters.num_preemptions_swap += 1
        else:
            self._give_up_blocks(victim)
            self.counters.num_preemptions_recompute += 1
        victim.num_preemptions += 1
        self._line_up(victim)

    def _give_up_blocks(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.table)
        sequence.restart(0)

    def _line_up(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        enter(self.waiting, sequence)

    def _refusal(self, budget: int) -> Blocked | None:
        """Why no waiting sequence can be admitted; a subclass may have reasons of its own."""
        seats = self.config.max_num_seqs - self.num_seats
        return self.admission.refusal(self.waiting, self.running, seats, budget, self.record)

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Move waiting sequences to `running` in order, until the next one does not fit."""
        pledged = self.admission.pledged(self.running)
        for sequence in self.admission.queue(self.waiting):
            headroom = self.admission.headroom if self.running else 0
            available = self.blocks.pool.num_free - pledged - headroom
            seats = self.config.max_num_seqs - self.num_seats
            decision = self.admission.decide(sequence, seats, budget, available)
            if isinstance(decision, Blocked):
                self.record.blocked = decision
                break
            if sequence.is_swapped:
                plan.swap_in += self.blocks.swap_in(sequence.table)
            else:
                self._begin(sequence, decision)
                if self.blocks.comes_with(plan.step, decision):
                    self._readers.add(sequence.seq_id)
            self._start_running(sequence)
            self._add_row(plan, sequence, self._chunk(sequence, budget))
            budget -= plan.rows[-1].num_tokens
            pledged += self.admission.pledge(sequence)
        if not self.policy.reads_cache:
            del self.waiting[: len(self.record.admitted)]
        elif self.record.admitted:
            self.waiting = [seq for seq in self.waiting if seq.status is Status.WAITING]

    def _begin(self, sequence: Sequence, match: Match) -> None:
        """Start a sequence from a prefix. Only the first time is that a hit: what a preempted
        sequence finds again was computed for itself."""
        if sequence.report is None:
            reads = sequence.request.params.prompt_logprobs is None
            sequence.report = self.blocks.report(
                sequence.request.prompt_token_ids, match.num_tokens, sequence.table.salt, reads
            )
            self.counters.num_prompt_tokens += sequence.num_tokens
            self.counters.num_cached_tokens += match.num_tokens
        self.blocks.adopt(sequence.table, match, sequence.token_ids)
        sequence.restart(match.num_tokens)

    def _start_running(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        self.num_seats += sequence.num_seats
        enter(self.running, sequence)
        self.record.admitted.append(sequence.seq_id)

    def _stop_running(self, sequence: Sequence) -> None:
        leave(self.running, sequence)
        self.num_seats -= sequence.num_seats
        if sequence.num_sent is not None:
            self._dropped.append(sequence.seq_id)
            sequence.num_sent = None

    def _add_row(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> None:
        """Put the next `num_tokens` of a sequence into the plan."""
        row = next_row(plan, sequence, num_tokens, self.blocks)
        plan.rows.append(row)
        self._flights.enter(sequence)
        ends = num_tokens == row.num_logits == 1  # the one token that was missing
        if ends and row.start >= sequence.num_prompt_tokens:
            self.log.record.num_decode_tokens += 1
        else:
            self.log.record.num_prefill_tokens += num_tokens

    # ---- one step: commit ----------------------------------------------------------------

    def distrust(self, plan: StepPlan, suspect: Collection[int]) -> None:
        """Before the commit of a plan, of which some rows may have computed something wrong."""
        distrust(plan.rows, suspect, self.in_flight, self.blocks)

    def commit(
        self,
        plan: StepPlan,
        sampled: Mapping[int, Sampled],
        num_drafted: Mapping[int, int] | None = None,
    ) -> list[Sequence]:
        """The plan was carried out: sequences grow by what was sampled. Returns new forks.

        `sampled` has, for each row with logits, the accepted tokens: one as a rule, up to
        `num_logits` where some of `num_drafted` were verified, one for each completion where the
        row forks. None is a sample that failed and ends its sequence. So does the last token by
        count; what only text can decide comes through `finish`.
        """
        record = self._flights.land(plan)
        self.blocks.settle(plan.step)
        # What is written into the record of a later step has the time of this one.
        self.log.time = record.computed if self._flights.plans else None
        forks: list[Sequence] = []
        for row in plan.rows:
            sequence = self._flights.leave(row.seq_id)
            if sequence.status is Status.FINISHED:  # while the plan ran
                if not sequence.num_in_flight:
                    self.blocks.release(sequence.table)
                continue
            if sequence.is_void:
                record.void.append(row.seq_id)
                if not sequence.num_in_flight:
                    self._stop_running(sequence)
                    self._give_up_blocks(sequence)
                    self._line_up(sequence)
                continue
            tokens = sampled[row.seq_id] if row.num_logits else []
            own, others = (tokens[:1], tokens[1:]) if row.num_forks else (tokens, ())
            again = sequence.advance(row.start, row.end_after(len(own)))
            if again:
                record.num_recomputed_tokens += again
                self.counters.num_recomputed_tokens += again
            failed = accept(sequence, own)  # first: an accepted draft may complete a block
            self.blocks.index_blocks(sequence.table, sequence.token_ids, sequence.num_certain)
            if row.num_logits > 1 and self.drafts is not None:
                drafted = self.drafts.settle(sequence, own, num_drafted, self.blocks)
                self.log.draft(record, sequence, drafted, self.counters)
            children = [self._fork(sequence, i) for i in range(1, len(tokens))] if others else ()
            self._end_by_count(sequence, failed)
            for child, token in zip(children, others, strict=True) if others else ():
                self._end_by_count(child, accept(child, [token]))
            forks += children
        return forks

    def _end_by_count(self, sequence: Sequence, failed: bool) -> None:
        """End a sequence whose sample failed, or that has all its tokens; one that samples nothing
        (`max_tokens` 0) has them when its prompt is computed."""
        is_full = sequence.num_tokens >= sequence.end
        if failed or (is_full and sequence.num_certain >= sequence.num_prompt_tokens):
            self.finish(sequence.seq_id, "error" if failed else "length")

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        """Another completion, over the blocks of the first until it writes. It takes a seat that
        was kept for it."""
        parent.num_forks -= 1
        child = self._new_sequence(parent.request, index, parent.arrival, parent.key[:-1])
        child.table = self.blocks.fork(parent.table)
        child.restart(parent.num_certain)
        child.status, child.report = Status.RUNNING, parent.report  # later finds are no hits
        enter(self.running, child)
        self._requests[parent.request.request_id].append(child)
        self.record.forked.append(Forked(child.seq_id, parent.seq_id, index))
        return child

    def _new_sequence(self, request: Request, index: int, arrival: int, key: Key) -> Sequence:
        seq_id = next(self.seq_ids)
        sequence = Sequence(seq_id, request, index, arrival, (*key, seq_id))
        self.sequences[seq_id] = sequence
        return sequence
