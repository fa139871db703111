"""Drafts where they pay: how many each row gets follows from what was measured so far.

                   no drafts                         drafts
    steps     ....................|t|........|t t t d d d d d d p p d d d d d ...
                    pause          |   twice  |      |           |
                                   one step   |      |           plain steps, to compare with
                                   is tried   it gained, and so it goes on

A step of B rows with drafts yields B + G tokens, if G drafts are accepted, and takes v times as
long as a plain one. So it gains if (1 + G / B) / v is above 1. G follows from `survival.py`, v
from `step_times.py`. What each row gets is a question of price: a place is drafted if its survival
reaches a level, the same for all rows, and the level is the one of best predicted gain.

What would be measured is no reason to lose: without drafts nothing is asked or spent. After a pause
one step with few drafts is tried, and each trial that loses doubles the pause. Whatever the
prediction says, drafts end where steps turn out to lose. No choice changes a token.
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

CHANGE = 1.05  # a choice changes for a gain of more than 5%
FIRST_PAUSE, LONGEST_PAUSE = 8, 64  # steps
LEAST_SHARE = 0.01  # of all time that trials may take once pauses are long
NEVER_TRIED = (0, FIRST_PAUSE)  # when a row is due, and the pause after that
COMPARE_AFTER, COMPARE = 96, 3  # so many steps with drafts, then so many without
DEEPER = 16  # one of so many steps has a draft more for each row that has some
STAKE = 2.0  # plain steps that a series of steps with drafts may lose, or keep of what it gained
MOST_LOST = 1.5  # plain steps that one step loses at most, as others may have disturbed it
TRIED = 2  # drafts of a row that is tried
CHEAP = 0.05  # plain steps; to ask for so little is no reason for a longer pause
SHARE_TRIED = 8  # one of so many rows is tried
FORGET_EVERY = 512  # steps


class AdaptiveDrafts(Drafts):
    """Chooses the drafts of every row and step, at most `num_tokens`; none where they would lose.

    All gains and losses are in plain steps of the same batch.
    """

    def __init__(
        self, num_tokens: int, max_num_seqs: int | None = None, max_position: int | None = None
    ):
        super().__init__(num_tokens, max_num_seqs, max_position)
        self.acceptance = Survival(num_tokens)
        self.times = StepTimes()
        self._records: list[StepRecord] = []  # not delivered yet, the oldest first
        self._delivered = 0.0  # when the last step was
        self._drafted = 0  # the last step that had drafts
        self._step = 0  # plans so far
        self._due = 0  # the first step that may have drafts
        self._since = 0  # steps with drafts since the last comparison
        self._level: int | None = None  # of `LEVELS`; None drafts nothing
        self._is_fresh = True  # no drafts since the last pause
        self._balance = self._peak = 0.0  # what drafts gained since then
        self._cost = 0.0  # what they lost, disturbances included
        self._has_gained = self._is_idle = False  # the last step with drafts: any accepted, none
        self._pause, self._loss = FIRST_PAUSE, 0.0  # the next pause; what the last trial lost
        self._turn = 0  # of the rows that are tried
        self._rows: dict[int, tuple[int, int]] = {}  # when rows without drafts are tried; a pause

    # ---- what was measured ---------------------------------------------------------------

    def watch(self, record: StepRecord) -> None:
        """A plan is made; those before it may have been delivered."""
        self._step += 1
        self._records.append(record)
        while len(self._records) > 1 and self._records[0].delivered:
            self._learn(self._records.pop(0))
        del self._records[:-3]  # the oldest was never delivered

    def observe(self, sequence: ScheduledSequence, num_drafted: int, num_accepted: int) -> None:
        """A row was verified."""
        self.acceptance.observe(sequence.seq_id, num_drafted, num_accepted)
        if num_accepted:
            self._rows.pop(sequence.seq_id, None)

    def _learn(self, record: StepRecord) -> None:
        """From the time of a step that only decoded."""
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
        elif since > 1:  # it was planned ahead, where that is done
            self.times.add_plain(batch, seconds)

    def _compare(self, record: StepRecord, batch: int, seconds: float, is_rare: bool) -> None:
        """A step with drafts, against a plain one."""
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
        gain = max(1 + accepted / batch - ratio, -MOST_LOST)
        self._balance = min(self._balance + gain, STAKE)
        self._peak = max(self._peak, self._balance)
        self._has_gained = accepted > 0
        self._is_idle = not drafted

    # ---- what is chosen ------------------------------------------------------------------

    def wants(self, sequence: ScheduledSequence, num_running: int) -> bool:
        """Whether the next step may have drafts; else it can be planned ahead."""
        return self._step + 1 >= self._due and super().wants(sequence, num_running)

    def extend(
        self,
        plan: StepPlan,
        sequences: Mapping[int, ScheduledSequence],
        num_running: int,
        blocks: BlockManager,
        config: SchedulerConfig,
    ) -> None:
        """Add drafts to the decode rows of a plan, unless there is a pause."""
        if self._step >= self._due:
            super().extend(plan, sequences, num_running, blocks, config)

    def lengths(self, sequences: Sequence[ScheduledSequence]) -> list[int]:
        """How many drafts each of these decoding sequences shall have; at most `num_tokens`."""
        batch = len(sequences)
        nothing = [0] * batch
        if not batch:
            return nothing
        if self.times.plain(batch) is None or self._since >= COMPARE_AFTER:
            self._since, self._due = 0, self._step + COMPARE
            return nothing
        seq_ids = [each.seq_id for each in sequences]
        self._forget_others(seq_ids)
        curves = self.acceptance.curves(seq_ids)
        was_off, self._level = self._level is None, self._choose(curves)
        if self._level is None and self._is_fresh and self._records[-1].num_prefill_tokens:
            return nothing  # a trial that could not be timed
        goes_on = self._is_fresh or (was_off and self._has_gained and self._balance > 0)
        if self._balance < -STAKE or (self._level is None and not goes_on):
            self._rest(batch)
            return nothing
        self._is_fresh = False
        self._since += 1
        return self._tried(batch) if self._level is None else self._counts(curves, seq_ids)

    def _choose(self, curves: Sequence[Curve]) -> int | None:
        """The level of best predicted gain, or the one there was if it is about as good."""
        gains = self._predict(curves)
        best, now = max(range(len(gains)), key=gains.__getitem__), self._level
        if now is None:
            return best if gains[best] > CHANGE else None
        if gains[best] <= CHANGE * gains[now]:
            best = now
        return best if gains[best] > 1 else None

    def _predict(self, curves: Sequence[Curve]) -> list[float]:
        """For each level, tokens per second compared with plain steps."""
        batch = len(curves)
        counts = map(sum, zip(*[curve.counts for curve in curves], strict=True))
        gains = map(sum, zip(*[curve.gains for curve in curves], strict=True))
        times = self.times.curve(batch)
        answered = sum([curve.answered for curve in curves]) / batch
        some = 1 - (1 - answered) ** batch  # the probability that a step has any drafts
        idle = at(times, 0.0)
        found = []
        for count, gain in zip(counts, gains, strict=True):
            seconds = (1 - some) * idle + some * at(times, count / batch / some)
            found.append((1 + gain / batch) / seconds)
        return found

    def _counts(self, curves: Sequence[Curve], seq_ids: Sequence[int]) -> list[int]:
        """The drafts of each row at this level; no step is far from those that were measured."""
        level = self._level or 0
        counts = [curve.nums[level] for curve in curves]
        if self._since % DEEPER == 0:  # how is the next place now?
            counts = [min(count + 1, self.num_tokens) if count else 0 for count in counts]
        drafts = sum([curve.counts[level] for curve in curves]) / len(curves)
        if (far := drafts / self.times.reach(len(curves))) > 1:
            most = max(1, int(self.num_tokens / far))
            counts = [min(count, most) for count in counts]
        if 0 in counts:
            pairs = zip(counts, seq_ids, strict=True)
            counts = [count or self._tried_row(seq_id) for count, seq_id in pairs]
        return counts

    # ---- trials --------------------------------------------------------------------------

    def _tried(self, batch: int) -> list[int]:
        """Few drafts for few rows, others each time."""
        num_rows = max(1, batch // SHARE_TRIED)
        self._turn = (self._turn + num_rows) % batch
        depth = min(TRIED, self.num_tokens)
        return [depth * ((place - self._turn) % batch < num_rows) for place in range(batch)]

    def _tried_row(self, seq_id: int) -> int:
        """Drafts of a row that shall have none while others have some: a few now and then."""
        due, pause = self._rows.get(seq_id, NEVER_TRIED)
        if due > self._step:
            return 0
        self._rows[seq_id] = self._step + pause, min(2 * pause, LONGEST_PAUSE)
        return min(TRIED, self.num_tokens) if due else 0

    def _rest(self, batch: int) -> None:
        """Pause; twice as long as the last time, unless drafts gained, or there were none and to
        ask for them costs hardly anything."""
        loss, self._cost = max(self._cost, 0.0), 0.0
        if self._balance < -STAKE:
            self.acceptance.doubt()
        if self._peak >= STAKE:
            self._pause = FIRST_PAUSE
        elif not self._is_idle or at(self.times.curve(batch), 0.0) > 1 + CHEAP:
            longest = max(LONGEST_PAUSE, min(loss, self._loss) / LEAST_SHARE)
            self._pause = min(2 * self._pause, int(longest))
        self._due, self._loss = self._step + self._pause, loss
        self._level, self._is_fresh = None, True
        self._balance = self._peak = 0.0

    def _forget_others(self, seq_ids: Sequence[int]) -> None:
        """Sequences that are gone."""
        if self._step % FORGET_EVERY == 0:
            self.acceptance.keep(seq_ids)
            kept = set(seq_ids)
            self._rows = {key: row for key, row in self._rows.items() if key in kept}
