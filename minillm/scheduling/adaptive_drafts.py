"""Adaptive speculative decoding: draft counts from measured acceptance rates and step times.

                   no drafts                            drafts
    steps     ....................|t t|..........|t t|d d d d d d p p p d d d d ...
                    pause          |     pause     |   |           |
                                   trial:          trial that      plain steps (without
                                   it loses        promises gains  drafts) to compare with

A step of B rows with drafts, of which G are accepted, yields B + G tokens, and takes v times as
long as a plain step (one without drafts). It gains if (1 + G / B) / v is above 1. `survival.py`
predicts G, `plan/step_times.py` predicts v.

A draft position of a row is drafted if its survival, the probability that it is accepted, reaches a
level. The level is the same for all rows: that of `LEVELS` with the best predicted gain.

During a pause there are no drafts, and the proposer is not called. Then a trial has few drafts for
few rows, in two steps if a model drafts: in the first it computes all that it has not computed yet,
so only the time of the second predicts others. Each losing trial doubles the pause. If one loses
much, the pause is long enough for it to be a small share of the time. Drafts also stop if measured
steps lose, whatever is predicted. The number of drafts affects the speed only, never the tokens.
"""

from collections.abc import Collection, Mapping

from minillm.cache.manager import BlockManager
from minillm.plan.step_times import StepTimes, at
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.record import StepRecord
from minillm.scheduling.request import Sequence
from minillm.scheduling.survival import Curve, Survival

MIN_GAIN = 1.05  # predicted, with which drafts begin; they end at 1
FIRST_PAUSE, MAX_PAUSE = 8, 64  # steps; pauses double up to the second while trials lose little
TRIAL_LOSS_SHARE = 0.01  # of the time
NEVER_TRIED = (0, FIRST_PAUSE)  # initial (step of the next trial, pause after it) of a row
COMPARE_AFTER, COMPARE_STEPS = 96, 3  # steps with drafts between comparisons; plain steps of each
CHOOSE_EVERY = 4  # steps with the same rows; choosing takes a tenth of a step of a small model
MAX_BALANCE = 2.0  # plain steps; maximum balance, and the loss at which drafts stop
TRIAL_DRAFTS = 2  # drafts of a row in a trial
CHEAP_PROPOSAL = 0.05  # plain steps; if proposing costs less, pauses do not grow
TRIAL_ROW_EVERY = 8  # rows; one of them has drafts in a trial
CLEAN_UP_EVERY = 512  # steps; finished sequences are dropped then


class AdaptiveDrafts(Drafts):
    """Chooses the number of drafts per row, up to `num_tokens`, and none if they would lose time.

    The unit of gains and losses is the time of a plain step of the same batch. `values` belong to
    the drafts of a tree, of which a row gets the first ones. `price` is what the first trial is
    expected to lose; it takes place when this is `TRIAL_LOSS_SHARE` of the steps.
    """

    def __init__(
        self,
        num_tokens: int,
        max_num_seqs: int | None = None,
        max_position: int | None = None,
        values: tuple[float, ...] | list[float] = (),
        price: float = 0.0,
    ):
        super().__init__(num_tokens, max_num_seqs, max_position)
        self.acceptance = Survival(num_tokens, values)
        self.times = StepTimes()
        self._records: list[StepRecord] = []  # of undelivered steps, the oldest first
        self._delivered = 0.0  # time at which the last step was delivered
        self._had_drafts = False  # whether the last delivered step had
        self._step = 0  # plans so far
        self._due = int(price / TRIAL_LOSS_SHARE)  # first step that may have drafts
        self._since = 0  # steps with drafts since the last plain ones
        self._level: int | None = None  # index into `LEVELS`
        self._tried, self._trial_steps = 0, 2 if price else 1  # of a trial so far, and in all
        self._trial: set[int] = set()  # its seq_ids
        self._first = 0  # number of its first step
        self._first_seconds = self._lag_price = 0.0  # of it; of a token that a proposer catches up
        self._lag = 0  # tokens that the proposer had not computed before the trial
        self._seen: dict[int, int] = {}  # tokens of a sequence at its last drafts, by seq_id
        self._gain = 1.0  # predicted
        self._chosen: tuple[list[int], list[int]] = [], []  # seq_ids, and drafts of each
        self._balance = self._peak = 0.0  # gain since the last pause; its maximum
        self._has_gained = False  # whether the last step with drafts had an accepted one
        self._cost = 0.0  # loss since the last pause, that of the trial included
        self._is_idle = False  # whether the proposer found no drafts for the last step with drafts
        self._pause, self._loss = FIRST_PAUSE, price  # next pause; loss of the last trial
        self._price = price or CHEAP_PROPOSAL  # what a trial loses, by row
        self._turn = 0  # first row of the next trial
        self._rows: dict[int, tuple[int, int]] = {}  # by seq_id; see NEVER_TRIED

    # ---- measuring -----------------------------------------------------------------------

    def watch(self, record: StepRecord) -> None:
        """Count a new plan, and learn from the steps delivered since the last."""
        self._step += 1
        if self._step + MAX_PAUSE < self._due:  # a long pause: measuring each step has a price, too
            self._records = []
            return
        self._records.append(record)
        while len(self._records) > 1 and self._records[0].delivered:
            self._learn(self._records.pop(0))
        del self._records[:-3]  # steps that were never delivered

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.acceptance.observe(sequence.seq_id, num_drafted, num_accepted)
        if num_accepted:
            self._rows.pop(sequence.seq_id, None)

    def _learn(self, record: StepRecord) -> None:
        """Learn from the time of a delivered step, if it only decoded."""
        seconds = record.delivered - max(record.started, self._delivered)
        self._delivered = record.delivered
        after_drafts, self._had_drafts = self._had_drafts, bool(record.drafted)
        batch = record.num_decode_tokens
        moved = record.copies or record.swap_out or record.swap_in
        if record.num_prefill_tokens or moved or not batch or seconds <= 0:
            return
        if record.drafted:
            self._compare(record, batch, seconds)
        elif not after_drafts:  # the step after drafts is slower: it cannot be planned ahead
            self.times.add_plain(batch, seconds)

    def _compare(self, record: StepRecord, batch: int, seconds: float) -> None:
        """Compare a step with drafts to a plain one."""
        plain = self.times.plain(batch)
        if plain is None:
            return
        drafted = sum(draft.num_drafted for draft in record.drafted)
        accepted = sum(draft.num_accepted for draft in record.drafted)
        self._cost += seconds / plain - 1 - accepted / batch
        self._is_idle = not drafted
        self._has_gained = accepted > 0
        if record.step == self._first and self._trial_steps > 1:
            self._first_seconds = seconds
        else:
            if self._first_seconds and self._lag:
                self._lag_price = max(self._first_seconds - seconds, 0.0) / self._lag
            self._first_seconds = 0.0
            self.times.add(batch, drafted / batch, seconds / plain)
            usual = at(self.times.curve(batch), drafted / batch)
            self._balance = min(self._balance + 1 + accepted / batch - usual, MAX_BALANCE)
            self._peak = max(self._peak, self._balance)

    # ---- choosing ------------------------------------------------------------------------

    def wants(self, sequence: Sequence, num_running: int) -> bool:
        """Whether the next step may have drafts; if not, it can be planned ahead."""
        return self._step + 1 >= self._due and super().wants(sequence, num_running)

    def extend(
        self,
        plan: StepPlan,
        sequences: Mapping[int, Sequence],
        num_running: int,
        blocks: BlockManager,
        config: SchedulerConfig,
    ) -> None:
        """Add drafts to the decode rows of a plan, except during a pause."""
        if self._step >= self._due:
            super().extend(plan, sequences, num_running, blocks, config)

    def lengths(self, sequences: list[Sequence]) -> list[int]:
        if not sequences or self._compares(len(sequences)):
            return [0] * len(sequences)
        self._drop_finished(sequences)
        if self._trial_steps > 1 and self._tried < self._trial_steps:
            return self._try(sequences)
        return self._keep(sequences) or self._choose(sequences)

    def _compares(self, batch: int) -> bool:
        """Whether the next steps are plain, to be compared with."""
        compares = self.times.plain(batch) is None or self._since >= COMPARE_AFTER
        if compares:
            self._since, self._due = 0, self._step + COMPARE_STEPS
            self._lag_price /= 2  # it may have been measured while something else ran
        return compares

    def _keep(self, sequences: list[Sequence]) -> list[int] | None:
        """The drafts of the last choice; None if it is time to choose again."""
        seq_ids, counts = self._chosen
        if not self._since % CHOOSE_EVERY or self._balance <= 0:
            return None
        if seq_ids != [sequence.seq_id for sequence in sequences]:
            return None
        self._since += 1
        self._remember(sequences, counts)
        return counts

    def _choose(self, sequences: list[Sequence]) -> list[int]:
        """Drafts per row at the best level; a trial or a pause if none gains."""
        batch, seq_ids = len(sequences), [sequence.seq_id for sequence in sequences]
        curves = self.acceptance.curves(seq_ids)
        was_trying, self._level = self._level is None, self._best_level(curves)
        goes_on = was_trying and self._has_gained and self._balance > 0
        if self._level is None and (self._tried < self._trial_steps or goes_on):
            return self._try(sequences)
        self._tried, counts = self._trial_steps, list[int]()
        if self._level is not None and self._balance >= -MAX_BALANCE:
            pairs = zip(self._counts(curves, seq_ids), sequences, strict=True)
            counts = [count * self._joins(one, batch) for count, one in pairs]
        if not any(counts):
            self._start_pause(batch)
            return [0] * batch
        self._since += 1
        self._remember(sequences, counts)
        self._chosen = seq_ids, counts
        return counts

    def _joins(self, sequence: Sequence, batch: int) -> bool:
        """Whether the tokens that a sequence still gets repay what the proposer has to catch up."""
        lag = sequence.num_tokens - self._seen.get(sequence.seq_id, 0)
        plain = (self.times.plain(batch) or 0.0) / batch
        saved = (sequence.end - sequence.num_tokens) * plain * (1 - 1 / self._gain)
        return lag <= self.num_tokens + COMPARE_STEPS + 1 or self._lag_price * lag < saved

    def _best_level(self, curves: list[Curve]) -> int | None:
        """The level with the best predicted gain, if it is large enough."""
        gains = self._predict(curves)
        self._gain, least = max(gains), MIN_GAIN if self._level is None else 1.0
        return gains.index(self._gain) if self._gain > least else None

    def _predict(self, curves: list[Curve]) -> list[float]:
        """Predicted gain of each level: tokens per second relative to plain steps."""
        batch = len(curves)
        counts = map(sum, zip(*[curve.counts for curve in curves], strict=True))
        gains = map(sum, zip(*[curve.gains for curve in curves], strict=True))
        times = self.times.curve(batch)
        answered = sum([curve.answered for curve in curves]) / batch
        p_any = 1 - (1 - answered) ** batch  # probability that a step has any drafts
        idle = at(times, 0.0)
        rates = []
        for count, gain in zip(counts, gains, strict=True):
            seconds = (1 - p_any) * idle + p_any * at(times, count / batch / p_any)
            rates.append((1 + gain / batch) / seconds)
        return rates

    def _counts(self, curves: list[Curve], seq_ids: Collection[int]) -> list[int]:
        """Drafts per row at the current level, limited to what `StepTimes.reach` allows."""
        level = self._level or 0
        counts = [curve.nums[level] for curve in curves]
        drafts = sum([curve.counts[level] for curve in curves]) / len(curves)
        if (excess := drafts / self.times.reach(len(curves))) > 1:
            most = max(1, int(self.num_tokens / excess))
            counts = [min(count, most) for count in counts]
        if 0 in counts:
            pairs = zip(counts, seq_ids, strict=True)
            counts = [count or self._trial_row(seq_id) for count, seq_id in pairs]
        return counts

    # ---- trials --------------------------------------------------------------------------

    def _try(self, sequences: list[Sequence]) -> list[int]:
        """Drafts per row of a step of a trial: few, for the same few rows in all of its steps. None
        beside prompts, whose steps are not timed."""
        seq_ids = [sequence.seq_id for sequence in sequences]
        if self._records[-1].num_prefill_tokens:
            return [0] * len(seq_ids)
        if not self._tried or self._trial.isdisjoint(seq_ids):
            # In turn; no more than lose a plain step.
            most = max(1, min(len(seq_ids) // TRIAL_ROW_EVERY, int(1 / self._price)))
            self._turn = (self._turn + most) % len(seq_ids)
            self._trial = set((seq_ids * 2)[self._turn : self._turn + most])
            self._first = self._records[-1].step
        self._tried += 1
        depth = min(TRIAL_DRAFTS, self.num_tokens)
        counts = [depth * (seq_id in self._trial) for seq_id in seq_ids]
        lag = self._remember(sequences, counts)
        self._lag = lag if self._tried == 1 else self._lag
        return counts

    def _remember(self, sequences: list[Sequence], counts: Collection[int]) -> int:
        """Remember how many tokens the proposer has computed after this step; returns how many of
        these it has not computed before."""
        lag = 0
        for sequence, count in zip(sequences, counts, strict=True):
            if count:
                lag += sequence.num_tokens - self._seen.get(sequence.seq_id, 0)
                self._seen[sequence.seq_id] = sequence.num_tokens
        return lag

    def _trial_row(self, seq_id: int) -> int:
        """Drafts of a row whose level allows none: a few at increasing intervals, else 0."""
        due, pause = self._rows.get(seq_id, NEVER_TRIED)
        if due > self._step:
            return 0
        self._rows[seq_id] = self._step + pause, min(2 * pause, MAX_PAUSE)
        return min(TRIAL_DRAFTS, self.num_tokens) if due else 0

    def _start_pause(self, batch: int) -> None:
        """Start a pause. Its length doubles, except if drafts gained (then it is `FIRST_PAUSE`), if
        much was lost, or if none were proposed and proposing is cheap (then it stays)."""
        loss, is_dear = max(self._cost, 0.0), self._trial_steps > 1
        paid = min(loss, self._loss)  # the larger one may be a disturbance
        if is_dear:
            paid = loss = (self._loss + min(loss, 2 * self._loss)) / 2
        self._loss, self._price = loss, max(paid / max(len(self._trial), 1), CHEAP_PROPOSAL)
        if self._peak >= MAX_BALANCE:
            self._pause = FIRST_PAUSE
        elif not self._is_idle or at(self.times.curve(batch), 0.0) > 1 + CHEAP_PROPOSAL:
            longest = max(MAX_PAUSE, int(paid / TRIAL_LOSS_SHARE))
            self._pause = longest if is_dear else min(2 * self._pause, longest)
        self._due = self._step + self._pause
        self._level, self._tried, self._chosen = None, 0, ([], [])
        self._balance = self._peak = self._cost = 0.0

    def _drop_finished(self, sequences: list[Sequence]) -> None:
        """Now and then, drop the state of finished sequences."""
        if self._step % CLEAN_UP_EVERY == 0:
            kept = {sequence.seq_id for sequence in sequences}
            self.acceptance.keep(kept)
            self._rows = {key: row for key, row in self._rows.items() if key in kept}
            self._seen = {key: seen for key, seen in self._seen.items() if key in kept}
