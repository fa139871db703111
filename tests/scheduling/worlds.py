"""Worlds in which steps are planned before the one before them is committed.

The rules and the promises are those of `machine.py`. What is different is when a plan is carried
out: at once, as early as a device may be, or as late as possible, after the next plan was made. The
oracle keeps its own tokens, as a device does, and every plan can only use those. With stages as
many plans are in flight as a pipeline has stages, and the oracle learns a token when its step is
committed, as the first stage does: a plan that needs one earlier fails.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.scheduler import Scheduler
from tests.scheduling.machine import Before, Setup, World, name_of
from tests.scheduling.oracle import VOCABULARY, Sample, require


class AheadWorld(World):
    """The same, one plan ahead wherever the scheduler lets it be."""

    late = False  # whether a plan is carried out when its tokens are asked for, and not at once

    def __init__(self, setup: Setup, coverage: Counter[str]):
        super().__init__(setup, coverage)
        self.under_way: list[StepPlan] = []
        self.done: dict[int, dict[int, list[Sample]]] = {}
        self.drafted: dict[int, dict[int, int]] = {}
        self.append = self.runner.append
        self.runner.append = lambda *_: None  # not at the commit: it has its tokens already

    def step(self) -> None:
        while self.under_way and not self.scheduler.has_work:
            super().step()  # rows of sequences that have ended
        super().step()

    def _begin(self, event: str | None, which: int) -> None:
        """Plan a step, if none is under way."""
        had_work = self.scheduler.has_work
        self.num_steps += had_work
        if not self.under_way:
            before = self._before()
            plan = self.scheduler.schedule()
            self.runner.hear(plan, self.scheduler.sequences)
            self._expect(plan, event, which)
            self._check_plan(before, plan, had_work)
            self._cover(before, plan)
            self._launch(plan)

    def _step(self, event: str | None, which: int, early: bool) -> None:
        self._begin(event, which)
        following = self.scheduler.schedule_ahead()
        if following is not None:
            self.runner.hear(following, self.scheduler.sequences)
            self._expect(following, event, which)
            self._check_ahead(following)
            self._launch(following)
        self._check_books()
        self._land(event, which, early)

    def _land(self, event: str | None, which: int, early: bool) -> None:
        """The oldest plan is carried out and committed."""
        plan = self.under_way.pop(0)
        if early:
            self._interrupt(event, which, plan)
        self._carry_out(plan)
        if not early:
            self._interrupt(event, which, plan)
        samples = self.done.pop(plan.step)
        self._conclude(plan, samples, event, which)

    def _launch(self, plan: StepPlan) -> None:
        self.under_way.append(plan)
        if not self.late:
            self._carry_out(plan)

    def _carry_out(self, plan: StepPlan) -> None:
        if plan.step in self.done:
            return
        samples = self.done[plan.step] = self._execute(plan)
        self.drafted[plan.step] = dict(self.runner.num_drafted)
        forks = {row.seq_id for row in plan.rows if row.num_forks}
        for seq_id, drawn in samples.items():
            for sample in drawn[:1] if seq_id in forks else drawn:
                self.append(seq_id, sample.fingerprint % VOCABULARY)

    def _num_drafted(self, plan: StepPlan) -> dict[int, int]:
        return self.drafted.pop(plan.step)

    def _check_ahead(self, plan: StepPlan) -> None:
        record = self.scheduler.record
        self.coverage["planned ahead"] += 1
        require(plan.rows, "progress", "an empty plan", record)
        require(not record.preempted and not plan.swap_out, "order", "preempted ahead", record)
        self._check_limits({row.seq_id: row for row in plan.rows})
        for row in plan.rows:
            void = self.scheduler.sequences[row.seq_id].is_void
            require(not void, "order", "a void sequence is planned ahead", row)
            if row.seq_id in record.admitted:
                self.furthest[row.seq_id] = max(self.furthest.get(row.seq_id, 0), row.start)
            most = self.scheduler.sequences[row.seq_id].request.max_computed
            require(row.start + row.num_tokens <= most, "limits", "beyond the last token", row)

    def _commit(
        self,
        plan: StepPlan,
        samples: Mapping[int, list[Sample]],
        sampled: dict[int, list[int]],
        failed: Mapping[int, int],
    ) -> None:
        gone = [row for row in plan.rows if row.seq_id not in self.scheduler.sequences]
        self.coverage["rows in vain"] += len(gone)
        super()._commit(plan, samples, sampled, failed)

    def _poison(self) -> None:
        if not self.late:  # else a copy may still have to read what its plan gave away
            super()._poison()

    def _check_commit(self) -> None:
        """Sequences hold the blocks of the plan that is under way, too."""
        for sequence in self.scheduler.sequences.values():
            completion = self.completions[name_of(sequence)]
            right = [*completion.request.prompt_token_ids, *completion.outputs]
            require(sequence.token_ids == right, "oracle", "tokens of", sequence.seq_id)
            self.furthest.setdefault(sequence.seq_id, sequence.num_computed)  # of a fork
        counted = self.scheduler.counters.num_recomputed_tokens
        require(counted == self.num_recomputed, "counters", counted, self.num_recomputed)


class LateWorld(AheadWorld):
    """A slow device."""

    late = True


class StagesWorld(AheadWorld):
    """Two to four plans in flight."""

    def __init__(self, setup: Setup, coverage: Counter[str]):
        super().__init__(setup, coverage)
        learn = self.append
        self.append = lambda *_: None  # not from its own stage
        self.runner.append = lambda seq_id, token: (  # at the commit, if it is known still
            learn(seq_id, token) if seq_id in self.runner.rows else None
        )
        self.num_stages = 2 + setup.capacity % 7 % 3
        config = replace(setup.config(), num_stages=self.num_stages)
        self.scheduler = Scheduler(config, self.manager)
        self.waited: Counter[int] = Counter()  # plans without a row of a sequence that decodes

    def _step(self, event: str | None, which: int, early: bool) -> None:
        self._begin(event, which)
        while (following := self.scheduler.schedule_ahead()) is not None:
            self.runner.hear(following, self.scheduler.sequences)
            self._expect(following, event, which)
            self._check_ahead(following)
            self._check_apart(following)
            self._launch(following)
        require(len(self.under_way) <= self.num_stages, "limits", "more plans than stages")
        self.coverage["as many as stages"] += len(self.under_way) == self.num_stages
        self._check_books()
        self._land(event, which, early)

    def _check_apart(self, plan: StepPlan) -> None:
        """A sequence is in one plan, but for the chunks of its prompt."""
        for other in self.under_way:
            sampling = {row.seq_id for row in other.rows if row.num_logits}
            for row in plan.rows:
                require(row.seq_id not in sampling, "order", "its token is not known", row)
        chunks = {row.seq_id for other in self.under_way for row in other.rows}
        self.coverage["chunks in a row"] += any(row.seq_id in chunks for row in plan.rows)

    def _check_decode(self, before: Before, rows: Mapping[int, Row]) -> None:
        """A decoding sequence has its turn after the others, unless memory is short."""
        record = self.scheduler.record
        if record.preempted or record.stalled:
            self.waited.clear()
        for seq_id, left in before.uncomputed.items():
            if seq_id in rows or left != 1 or seq_id not in self.scheduler.sequences:
                self.waited.pop(seq_id, None)
                continue
            self.waited[seq_id] += 1
            most = 2 * self.num_stages + 2
            require(self.waited[seq_id] <= most, "decode", f"{seq_id} waits for its turn")


class LateStagesWorld(StagesWorld):
    """Slow stages."""

    late = True
