"""The real scheduler on a virtual clock: steps take given times, drafts are accepted by chance.

Nothing is computed. A sequence's proposer answers with some probability and its drafts are accepted
with another one, both given by the test; a step takes the seconds of the test's step times.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockManager
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.plan import Row
from minillm.scheduling.record import StepRecord
from minillm.scheduling.request import Request
from minillm.scheduling.scheduler import Scheduler

StepTime = Callable[[int, int, bool], float]  # seconds of (sequences, tokens, drafts asked)


@dataclass
class Habit:
    """How a sequence's drafts fare: probabilities of an answer, that a draft is accepted, and that
    another one follows it."""

    accepted: float
    answered: float = 1.0
    followed: float = 1.0


@dataclass
class Machine:
    """A scheduler with drafts, its clock, and what happened."""

    drafts: Drafts
    step_time: StepTime
    seed: int = 0
    noise: float = 0.0
    pauses: float = 0.0  # how often something else has the processor for up to 4 plain steps
    lag: float = 0.0  # seconds of a token that the proposer has not computed when a row has drafts
    clock: float = 0.0
    habits: dict[str, Habit] = field(default_factory=dict)
    steps: list[tuple[StepRecord, float, int]] = field(default_factory=list)  # seconds, tokens

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.known: dict[int, int] = {}  # tokens that the proposer has computed, by sequence
        config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048)
        self.scheduler = Scheduler(config, BlockManager(40000, 16, None, 0), drafts=self.drafts)

    def add(self, name: str, habit: Habit, max_tokens: int = 4000, prompt: int = 3) -> None:
        """A request whose prompt is computed at once."""
        self.habits[name] = habit
        params, ids = SamplingParams(max_tokens=max_tokens), (1,) * prompt
        self.scheduler.add(Request(name, ids, params, max_tokens, arrival=self.clock))

    def serve(self, count: int, batch: int, habit: Habit, **sizes: int) -> float:
        """So many requests, `batch` at a time; returns tokens per second."""
        before, start = len(self.steps), self.clock
        for number in range(count):
            self.add(f"{start}, {number}", habit, **sizes)
            while self.scheduler.has_work and (number + 1) % batch == 0:
                self.step()
        return sum(tokens for *_, tokens in self.steps[before:]) / (self.clock - start)

    def run(self, count: int) -> None:
        """So many steps."""
        for _ in range(count):
            self.step()

    def step(self) -> None:
        """Plan, sample, commit."""
        started = self.clock
        plan = self.scheduler.schedule()
        record = self.scheduler.record
        record.started = record.planned = started
        sampled: dict[int, list[int | None]] = {}
        num_drafted: dict[int, int] = {}
        tokens = missing = 0
        for row in plan.rows:
            drafted, accepted = self._verify(row)
            if row.num_logits > 1:
                missing += row.start - self.known.get(row.seq_id, 0)
                self.known[row.seq_id] = row.start
            tokens += row.num_tokens if row.num_logits < 2 else 1 + drafted
            if drafted:
                num_drafted[row.seq_id] = drafted
            sampled[row.seq_id] = [7] * (1 + accepted)
        asked = any(row.num_logits > 1 for row in plan.rows)
        seconds = self.step_time(len(plan.rows), tokens, asked) + self.lag * missing
        if self.noise:
            seconds *= 1 + self.random.expovariate(1 / self.noise)
        if self.random.random() < self.pauses:
            seconds += self.random.uniform(0.0, 4.0) * self.step_time(
                len(plan.rows), len(plan.rows), False
            )
        self.clock += seconds
        record.computed = self.clock
        self.scheduler.commit(plan, sampled, num_drafted)
        record.delivered = self.clock
        self.steps.append((record, seconds, sum(map(len, sampled.values()))))

    def _verify(self, row: Row) -> tuple[int, int]:
        """Drafts of a row, and how many are accepted."""
        wanted = row.num_logits - 1
        sequence = self.scheduler.sequences[row.seq_id]
        habit = self.habits[sequence.request.request_id]
        if wanted < 1 or self.random.random() >= habit.answered:
            return 0, 0
        drafted = 1
        while drafted < wanted and (habit.followed == 1 or self.random.random() < habit.followed):
            drafted += 1
        accepted = 0
        while accepted < drafted and self.random.random() < habit.accepted:
            accepted += 1
        return drafted, accepted

    def speed(self, last: int) -> float:
        """Tokens per second of the last steps."""
        steps = self.steps[-last:]
        return sum(tokens for *_, tokens in steps) / sum(seconds for _, seconds, _ in steps)

    def run_plain(self, count: int) -> float:
        """Tokens per second of the same machine without drafts."""
        other = Machine(Drafts(0), self.step_time, self.seed, self.noise, self.pauses)
        for name, habit in self.habits.items():
            other.add(name, habit)
        other.run(count + 1)
        return other.speed(count)

    def asked(self, last: int) -> list[int]:
        """Drafts that were asked for in each of the last steps."""
        return [sum(row.num_logits - 1 for row in record.rows) for record, *_ in self.steps[-last:]]
