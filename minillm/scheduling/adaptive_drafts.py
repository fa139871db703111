"""Adaptive speculative decoding: draft counts from measured acceptance rates and step times.

                   no drafts                         drafts
    steps     ....................|t|........|t t t d d d d d d p p p d d d d ...
                    pause          |  pause   |      |           |
                                   trial:     trials gain,       plain steps (without
                                   it loses   so drafts go on    drafts) to compare with

A step of B rows with drafts, of which G are accepted, yields B + G tokens, and takes v times as
long as a plain step (one without drafts). It gains if (1 + G / B) / v is above 1. `survival.py`
predicts G, `plan/step_times.py` predicts v.

A draft position of a row is drafted if its survival, the probability that it is accepted, reaches a
level. The level is the same for all rows: that of `LEVELS` with the best predicted gain.

During a pause there are no drafts, and the proposer is not called. After it, a trial step has few
drafts, and each losing trial doubles the pause. Drafts also stop if measured steps lose, whatever
is predicted. The number of drafts affects the speed only, never the tokens.
"""

from collections.abc import Mapping, Sequence

from minillm.cache.manager import BlockManager
from minillm.plan.step_times import OUTLIER, StepTimes, at
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.record import StepRecord
from minillm.scheduling.request import Sequence as ScheduledSequence
from minillm.scheduling.survival import Curve, Survival

MIN_CHANGE = 1.05  # the level changes for a predicted gain of more than 5%
FIRST_PAUSE, MAX_PAUSE = 8, 64  # steps
TRIAL_LOSS_SHARE = 0.01  # of the time; pauses beyond MAX_PAUSE grow while trials lose more
NEVER_TRIED = (0, FIRST_PAUSE)  # initial (step of the next trial, pause after it) of a row
COMPARE_AFTER, COMPARE_STEPS = 96, 3  # steps with drafts between comparisons; plain steps of each
DEEPER_EVERY = 16  # steps; then each row with drafts has one more, to measure it
MAX_BALANCE = 2.0  # plain steps; maximum balance, and the loss at which drafts stop
MAX_STEP_LOSS = 1.5  # plain steps; more is attributed to other load on the machine
TRIAL_DRAFTS = 2  # drafts of a row in a trial
CHEAP_PROPOSAL = 0.05  # plain steps; if proposing costs less, pauses do not grow
TRIAL_ROW_EVERY = 8  # rows; one of them has drafts in a trial
CLEAN_UP_EVERY = 512  # steps; finished sequences are dropped then


class AdaptiveDrafts(Drafts):
    """Chooses the number of drafts per row, up to `num_tokens`, and none if they would lose time.

    The unit of gains and losses is the time of a plain step of the same batch. `values` belong to
    the drafts of a tree, of which a row gets the first ones.
    """

    def __init__(
        self,
        num_tokens: int,
        max_num_seqs: int | None = None,
        max_position: int | None = None,
        values: Sequence[float] = (),
    ):
        super().__init__(num_tokens, max_num_seqs, max_position)
        self.acceptance = Survival(num_tokens, values)
        self.times = StepTimes()
        self._records: list[StepRecord] = []  # of undelivered steps, the oldest first
        self._delivered = 0.0  # time at which the last step was delivered
        self._drafted = 0  # number of the last step with drafts
        self._step = 0  # plans so far
        self._due = 0  # first step that may have drafts
        self._since = 0  # steps with drafts since the last plain ones
        self._level: int | None = None  # index into `LEVELS`; None: no drafts
        self._is_after_pause = True  # no drafts since the last pause
        self._balance = self._peak = 0.0  # gain since the last pause; its maximum
        self._cost = 0.0  # uncapped loss since the last pause
        self._has_gained = False  # whether the last step with drafts had an accepted one
        self._is_idle = False  # whether the proposer found no drafts for that step
        self._pause, self._loss = FIRST_PAUSE, 0.0  # next pause; loss of the last trial
        self._turn = 0  # first row of the next trial
        self._rows: dict[int, tuple[int, int]] = {}  # by seq_id; see NEVER_TRIED

    # ---- measuring -----------------------------------------------------------------------

    def watch(self, record: StepRecord) -> None:
        """Count a new plan, and learn from the steps delivered since the last."""
        self._step += 1
        self._records.append(record)
        while len(self._records) > 1 and self._records[0].delivered:
            self._learn(self._records.pop(0))
        del self._records[:-3]  # steps that were never delivered

    def observe(self, sequence: ScheduledSequence, num_drafted: int, num_accepted: int) -> None:
        self.acceptance.observe(sequence.seq_id, num_drafted, num_accepted)
        if num_accepted:
            self._rows.pop(sequence.seq_id, None)

    def _learn(self, record: StepRecord) -> None:
        """Learn from the time of a delivered step, if it only decoded."""
        seconds = record.delivered - max(record.started, self._delivered)
        self._delivered = record.delivered
        since = record.step - self._drafted
        if record.drafted:
            self._drafted = record.step
        batch = record.num_decode_tokens
        moved = record.copies or record.swap_out or record.swap_in
        if record.num_prefill_tokens or moved or not batch or seconds <= 0:
            return
        if record.drafted:
            self._compare(record, batch, seconds, is_rare=since > FIRST_PAUSE)
        elif since > 1:  # the step after drafts is slower: it cannot be planned ahead
            self.times.add_plain(batch, seconds)

    def _compare(self, record: StepRecord, batch: int, seconds: float, is_rare: bool) -> None:
        """Compare a step with drafts to a plain one."""
        plain = self.times.plain(batch)
        if plain is None:
            return
        drafted = sum(each.num_drafted for each in record.drafted)
        accepted = sum(each.num_accepted for each in record.drafted)
        ratio = seconds / plain
        expected = at(self.times.curve(batch), drafted / batch)
        self.times.add(batch, drafted / batch, ratio, is_rare)
        self._cost += ratio - 1 - accepted / batch
        ratio = min(ratio, expected * OUTLIER) / self.times.disturbance
        gain = max(1 + accepted / batch - ratio, -MAX_STEP_LOSS)
        self._balance = min(self._balance + gain, MAX_BALANCE)
        self._peak = max(self._peak, self._balance)
        self._has_gained = accepted > 0
        self._is_idle = not drafted

    # ---- choosing ------------------------------------------------------------------------

    def wants(self, sequence: ScheduledSequence, num_running: int) -> bool:
        """Whether the next step may have drafts; if not, it can be planned ahead."""
        return self._step + 1 >= self._due and super().wants(sequence, num_running)

    def extend(
        self,
        plan: StepPlan,
        sequences: Mapping[int, ScheduledSequence],
        num_running: int,
        blocks: BlockManager,
        config: SchedulerConfig,
    ) -> None:
        """Add drafts to the decode rows of a plan, except during a pause."""
        if self._step >= self._due:
            super().extend(plan, sequences, num_running, blocks, config)

    def lengths(self, sequences: Sequence[ScheduledSequence]) -> list[int]:
        batch = len(sequences)
        nothing = [0] * batch
        if not batch:
            return nothing
        if self.times.plain(batch) is None or self._since >= COMPARE_AFTER:
            self._since, self._due = 0, self._step + COMPARE_STEPS
            return nothing
        seq_ids = [each.seq_id for each in sequences]
        self._drop_finished(seq_ids)
        curves = self.acceptance.curves(seq_ids)
        was_pausing, self._level = self._level is None, self._choose(curves)
        if self._level is None and self._is_after_pause and self._records[-1].num_prefill_tokens:
            return nothing  # no trial: a step with prefill is not timed
        may_try = self._is_after_pause or (was_pausing and self._has_gained and self._balance > 0)
        if self._balance < -MAX_BALANCE or (self._level is None and not may_try):
            self._start_pause(batch)
            return nothing
        self._is_after_pause = False
        self._since += 1
        return self._trial(batch) if self._level is None else self._counts(curves, seq_ids)

    def _choose(self, curves: Sequence[Curve]) -> int | None:
        """The level with the best predicted gain; the current one if it is about as good."""
        gains = self._predict(curves)
        best, now = max(range(len(gains)), key=gains.__getitem__), self._level
        if now is None:
            return best if gains[best] > MIN_CHANGE else None
        if gains[best] <= MIN_CHANGE * gains[now]:
            best = now
        return best if gains[best] > 1 else None

    def _predict(self, curves: Sequence[Curve]) -> list[float]:
        """Predicted gain of each level: tokens per second relative to plain steps."""
        batch = len(curves)
        counts = map(sum, zip(*[curve.counts for curve in curves], strict=True))
        gains = map(sum, zip(*[curve.gains for curve in curves], strict=True))
        times = self.times.curve(batch)
        answered = sum([curve.answered for curve in curves]) / batch
        p_any = 1 - (1 - answered) ** batch  # probability that a step has any drafts
        idle = at(times, 0.0)
        found = []
        for count, gain in zip(counts, gains, strict=True):
            seconds = (1 - p_any) * idle + p_any * at(times, count / batch / p_any)
            found.append((1 + gain / batch) / seconds)
        return found

    def _counts(self, curves: Sequence[Curve], seq_ids: Sequence[int]) -> list[int]:
        """Drafts per row at the current level, limited to what `StepTimes.reach` allows."""
        level = self._level or 0
        counts = [curve.nums[level] for curve in curves]
        if self._since % DEEPER_EVERY == 0:
            counts = [min(count + 1, self.num_tokens) if count else 0 for count in counts]
        drafts = sum([curve.counts[level] for curve in curves]) / len(curves)
        if (excess := drafts / self.times.reach(len(curves))) > 1:
            most = max(1, int(self.num_tokens / excess))
            counts = [min(count, most) for count in counts]
        if 0 in counts:
            pairs = zip(counts, seq_ids, strict=True)
            counts = [count or self._trial_row(seq_id) for count, seq_id in pairs]
        return counts

    # ---- trials --------------------------------------------------------------------------

    def _trial(self, batch: int) -> list[int]:
        """Drafts per row of a trial step: few, for a few rows in turn."""
        num_rows = max(1, batch // TRIAL_ROW_EVERY)
        self._turn = (self._turn + num_rows) % batch
        depth = min(TRIAL_DRAFTS, self.num_tokens)
        return [depth * ((place - self._turn) % batch < num_rows) for place in range(batch)]

    def _trial_row(self, seq_id: int) -> int:
        """Drafts of a row whose level allows none: a few at increasing intervals, else 0."""
        due, pause = self._rows.get(seq_id, NEVER_TRIED)
        if due > self._step:
            return 0
        self._rows[seq_id] = self._step + pause, min(2 * pause, MAX_PAUSE)
        return min(TRIAL_DRAFTS, self.num_tokens) if due else 0

    def _start_pause(self, batch: int) -> None:
        """Start a pause. Its length doubles, except if drafts gained (then it is `FIRST_PAUSE`), or
        if none were proposed and proposing is cheap (then it stays)."""
        loss, self._cost = max(self._cost, 0.0), 0.0
        if self._balance < -MAX_BALANCE:
            self.acceptance.discount()
        if self._peak >= MAX_BALANCE:
            self._pause = FIRST_PAUSE
        elif not self._is_idle or at(self.times.curve(batch), 0.0) > 1 + CHEAP_PROPOSAL:
            longest = max(MAX_PAUSE, min(loss, self._loss) / TRIAL_LOSS_SHARE)
            self._pause = min(2 * self._pause, int(longest))
        self._due, self._loss = self._step + self._pause, loss
        self._level, self._is_after_pause = None, True
        self._balance = self._peak = 0.0

    def _drop_finished(self, seq_ids: Sequence[int]) -> None:
        """Now and then, drop the state of finished sequences."""
        if self._step % CLEAN_UP_EVERY == 0:
            self.acceptance.keep(seq_ids)
            kept = set(seq_ids)
            self._rows = {key: row for key, row in self._rows.items() if key in kept}
