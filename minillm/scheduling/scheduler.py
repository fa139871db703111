"""The scheduler: spends a token budget per step, first on running sequences, then on waiting ones.

              add                 admit                    last token, stop, abort
    request ------>  waiting  ------------->  running  ------------------------->  finished
                        ^                        |
                        +------- preempt --------+      blocks freed, or swapped to host memory

Prefill and decode are not separate phases: a step computes the next uncomputed tokens of each
scheduled sequence. `schedule` plans a step from token counts; `commit` applies its sampled tokens.
Blocks that a plan uses are freed at its commit or later, even if their request is aborted earlier.
"""

from collections.abc import Collection, Mapping
from itertools import count

from minillm.cache.blocks import AccountingError
from minillm.cache.manager import BlockManager
from minillm.cache.prefix import Match
from minillm.errors import InvalidRequestError
from minillm.scheduling.admission import Admission, check_fits, insert, remove
from minillm.scheduling.ahead import InFlight, prepare_ahead
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.failed_rows import invalidate
from minillm.scheduling.pipelined import most_decoding, scheduling_order
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.policies import POLICIES, Policy
from minillm.scheduling.record import Blocked, Counters, Forked, Logbook, Preemption, StepRecord
from minillm.scheduling.request import Key, Request, Sequence, Status
from minillm.scheduling.rows import Sampled, accept, next_row, put_in_order, why_stalled


class Scheduler:
    """Decides which sequences a step computes, how many tokens of each, and into which blocks.

    `running` and `waiting` are sorted by the policy's keys. `record` describes the last step.
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
        self.sequences: dict[int, Sequence] = {}  # unfinished, by seq_id
        self.log, self.counters = Logbook(), Counters()
        self.admission = Admission(config, blocks, self.policy)
        self._requests: dict[str, list[Sequence]] = {}
        self._num_arrivals, self.seq_ids = 0, count()
        self.num_seqs = 0  # running, of `max_num_seqs`; includes future forks
        self._dropped: list[int] = []  # seq_ids for `StepPlan.dropped` of the next plan
        self._readers: set[int] = set()  # seq_ids whose cached prefix the new plan itself computes
        self.in_flight = InFlight()

    @property
    def record(self) -> StepRecord:
        """The record of the last step."""
        return self.log.record

    # ---- requests ------------------------------------------------------------------------

    def knows(self, request_id: str) -> bool:
        """Whether an unfinished request has this id."""
        return request_id in self._requests

    def add(self, request: Request) -> Sequence:
        """Add a request to the waiting queue.

        Raises:
            InvalidRequestError: its id is in use, or it does not fit even if it runs alone.
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
        insert(self.waiting, sequence)
        self.log.add(sequence)
        return sequence

    def abort(self, request_id: str, reason: str = "abort", time: float | None = None) -> None:
        """Finish all sequences of a request; an unknown or finished request is ignored."""
        for sequence in list(self._requests.get(request_id, ())):
            self.finish(sequence.seq_id, reason, time)

    def finish(
        self, seq_id: int, reason: str = "stop", time: float | None = None, num_cut: int = 0
    ) -> None:
        """Finish a sequence that stopped or failed; if it had finished, only correct its record.

        Its blocks are freed now, or when its last row in flight is committed. The last `num_cut`
        tokens, sampled after a stop, are removed. `time` None is the time of the step's tokens.
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
            remove(self.waiting, sequence)
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
        """A new scheduler without requests, for use after an internal error. Step and sequence
        numbers continue, so that they are unique in a trace."""
        scheduler = Scheduler(self.config, self.blocks.emptied(), self.policy, self.drafts)
        scheduler.log, scheduler.counters = self.log, self.counters
        scheduler.seq_ids, scheduler._num_arrivals = self.seq_ids, self._num_arrivals
        return scheduler

    # ---- one step: plan ------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step. All earlier plans must be committed."""
        if self.in_flight:
            raise AccountingError("The last plan was not committed.")
        self.in_flight.plans.clear()
        return self._plan()

    def schedule_ahead(self) -> StepPlan | None:
        """Plan the next step before the previous plan is committed; None if it must wait."""
        may = prepare_ahead(self.in_flight, self.running, self.blocks, self.config, self.drafts)
        return self._plan() if may else None

    def _plan(self) -> StepPlan:
        """Make a plan: rows of running sequences, then of admitted ones, then drafts."""
        self.counters.num_steps += 1
        plan, self._dropped = StepPlan(self.counters.num_steps, dropped=self._dropped), []
        self.log.begin(plan)
        self.in_flight.plans.append((plan, self.record))
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
        """Add rows for running sequences, decode rows first; returns the remaining budget.

        The budget is at least `max_num_seqs`, so it suffices for every decoding sequence."""
        max_decode_rows = most_decoding(len(self.running), self.config)
        for sequence in scheduling_order(self.running, self.config):
            if sequence.status is not Status.RUNNING or sequence.awaits_commit:
                continue  # preempted in this plan, or waits for a commit
            if len(plan.rows) >= max_decode_rows and sequence.num_uncomputed == 1:
                continue  # left for another plan of the pipeline
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
        """Preempt sequences behind `sequence`, the last first, until `num_tokens` fit into blocks.

        Returns the number of tokens that fit: fewer, maybe 0, if nothing is left to preempt.
        Sequences with a row in flight or in this plan are not preempted, so at least one advances.
        """
        start, pool = sequence.num_computed, self.blocks.pool
        if not num_tokens or pool.num_free > num_tokens:  # at most 1 block per token and 1 copy
            return num_tokens
        # Recounted after each preemption: the copy of a shared last block may become unnecessary.
        while self.blocks.num_needed(sequence.table, start, start + num_tokens) > pool.num_free:
            victim = self._victim(sequence)
            if victim is None:
                return min(num_tokens, self.blocks.num_writable(sequence.table, start))
            self._preempt(victim, sequence, plan)
        return num_tokens

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The last running sequence behind `sequence` that has no row in flight, or None."""
        for other in reversed(self.running):
            if other is sequence:
                return None
            if other.seq_id not in self.in_flight:
                return other
        return None

    def _preempt(self, victim: Sequence, winner: Sequence, plan: StepPlan) -> None:
        """Free or swap out a sequence's blocks, and requeue it with its old key."""
        self._stop_running(victim)
        mode = self.config.preemption_mode
        if mode == "swap" and not self.blocks.can_swap_out(victim.table):
            mode = "recompute"  # host memory is full
        event = Preemption(victim.seq_id, winner.seq_id, mode, victim.num_committed)
        self.record.preempted.append(event)
        if mode == "swap":
            plan.swap_out += self.blocks.swap_out(victim.table)
            self.counters.num_preemptions_swap += 1
        else:
            self._free_blocks(victim)
            self.counters.num_preemptions_recompute += 1
        victim.num_preemptions += 1
        self._enqueue(victim)

    def _free_blocks(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.table)
        sequence.restart(0)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        insert(self.waiting, sequence)

    def _refusal(self, budget: int) -> Blocked | None:
        """Why no waiting sequence can be admitted, or None; subclasses may add reasons."""
        free_seqs = self.config.max_num_seqs - self.num_seqs
        return self.admission.refusal(self.waiting, self.running, free_seqs, budget, self.record)

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Admit waiting sequences in order, until one does not fit."""
        reserved = self.admission.num_reserved(self.running)
        for sequence in self.admission.queue(self.waiting):
            headroom = self.admission.headroom if self.running else 0
            available = self.blocks.pool.num_free - reserved - headroom
            free_seqs = self.config.max_num_seqs - self.num_seqs
            decision = self.admission.decide(sequence, free_seqs, budget, available)
            if isinstance(decision, Blocked):
                self.record.blocked = decision
                break
            if sequence.is_swapped:
                plan.swap_in += self.blocks.swap_in(sequence.table)
            else:
                self._begin(sequence, decision)
                if self.blocks.is_written_by(plan.step, decision):
                    self._readers.add(sequence.seq_id)
            self._start_running(sequence)
            self._add_row(plan, sequence, self._chunk(sequence, budget))
            budget -= plan.rows[-1].num_tokens
            reserved += self.admission.num_reserved_for(sequence)
        if not self.policy.reads_cache:
            del self.waiting[: len(self.record.admitted)]
        elif self.record.admitted:
            self.waiting = [seq for seq in self.waiting if seq.status is Status.WAITING]

    def _begin(self, sequence: Sequence, match: Match) -> None:
        """Start a sequence with its cached prefix. Only the first admission counts cached tokens:
        after a preemption, a sequence may find its own blocks in the cache."""
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
        self.num_seqs += sequence.num_seqs
        insert(self.running, sequence)
        self.record.admitted.append(sequence.seq_id)

    def _stop_running(self, sequence: Sequence) -> None:
        remove(self.running, sequence)
        self.num_seqs -= sequence.num_seqs
        if sequence.num_sent is not None:
            self._dropped.append(sequence.seq_id)
            sequence.num_sent = None

    def _add_row(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> None:
        """Add a row for the next `num_tokens` tokens of a sequence."""
        row = next_row(plan, sequence, num_tokens, self.blocks)
        plan.rows.append(row)
        self.in_flight.add_row(sequence)
        is_last = num_tokens == row.num_logits == 1  # the only uncomputed token
        if is_last and row.start >= sequence.num_prompt_tokens:
            self.log.record.num_decode_tokens += 1
        else:
            self.log.record.num_prefill_tokens += num_tokens

    # ---- one step: commit ----------------------------------------------------------------

    def invalidate(self, plan: StepPlan, suspect: Collection[int]) -> None:
        """Before the commit, invalidate the blocks of failed rows (`suspect`: seq_ids)."""
        invalidate(plan.rows, suspect, self.in_flight, self.blocks)

    def commit(
        self,
        plan: StepPlan,
        sampled: Mapping[int, Sampled],
        num_drafted: Mapping[int, int] | None = None,
    ) -> list[Sequence]:
        """Apply the result of the oldest plan; returns the new sequences (forks).

        `sampled` has the tokens of each row with logits: usually one; 1 to `num_logits` for
        verified drafts (`num_drafted`); one per completion for a fork. None is a failed sample.
        Sequences are finished that failed or reached `max_tokens`. On a stop token or stop string
        the engine calls `finish`.
        """
        record = self.in_flight.remove_plan(plan)
        self.blocks.mark_written(plan.step)
        # If a later step is planned, this commit's events go to that record, with this step's time.
        time = record.computed if self.in_flight.plans else None
        forks: list[Sequence] = []
        for row in plan.rows:
            sequence = self.in_flight.remove_row(row.seq_id)
            if sequence.status is Status.FINISHED:  # aborted while the plan was in flight
                if not sequence.num_in_flight:
                    self.blocks.release(sequence.table)
                continue
            if sequence.is_void:
                record.void.append(row.seq_id)
                if not sequence.num_in_flight:
                    self._stop_running(sequence)
                    self._free_blocks(sequence)
                    self._enqueue(sequence)
                continue
            tokens = sampled[row.seq_id] if row.num_logits else []
            own, others = (tokens[:1], tokens[1:]) if row.num_forks else (tokens, ())
            recomputed = sequence.advance(row.start, row.end_after(len(own)))
            if recomputed:
                record.num_recomputed_tokens += recomputed
                self.counters.num_recomputed_tokens += recomputed
            failed = accept(sequence, own)  # before indexing: accepted drafts may fill a block
            self.blocks.index_blocks(sequence.table, sequence.token_ids, sequence.num_committed)
            if row.num_logits > 1 and self.drafts is not None:
                drafted = self.drafts.free_rejected(sequence, own, num_drafted, self.blocks)
                self.log.draft(record, sequence, drafted, self.counters)
            children = [self._fork(sequence, i) for i in range(1, len(tokens))] if others else ()
            self._finish_if_done(sequence, failed, time)
            for child, token in zip(children, others, strict=True) if others else ():
                self._finish_if_done(child, accept(child, [token]), time)
            forks += children
        return forks

    def _finish_if_done(self, sequence: Sequence, failed: bool, time: float | None) -> None:
        """Finish a sequence if sampling failed, or if it has `max_tokens` new tokens and its whole
        prompt is computed."""
        is_full = sequence.num_tokens >= sequence.end
        if failed or (is_full and sequence.num_committed >= sequence.num_prompt_tokens):
            self.finish(sequence.seq_id, "error" if failed else "length", time)

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        """Add another completion of the request, which shares the parent's blocks (copy-on-write).
        It takes a seat that the parent held for it."""
        parent.num_forks -= 1
        child = self._new_sequence(parent.request, index, parent.arrival, parent.key[:-1])
        child.table = self.blocks.fork(parent.table)
        child.restart(parent.num_committed)
        child.status, child.report = Status.RUNNING, parent.report
        insert(self.running, child)
        self._requests[parent.request.request_id].append(child)
        self.record.forked.append(Forked(child.seq_id, parent.seq_id, index))
        return child

    def _new_sequence(self, request: Request, index: int, arrival: int, key: Key) -> Sequence:
        seq_id = next(self.seq_ids)
        sequence = Sequence(seq_id, request, index, arrival, (*key, seq_id))
        self.sequences[seq_id] = sequence
        return sequence
