"""What speculative decoding gains, by counting: tokens per step against the cost of a step.

    speed-up = E / (v + D + h)

    E   tokens of a sequence per step: 1 and the accepted drafts, the sum of their survival
    v   time of the step that verifies over that of a plain step, T(B (k + 1)) / T(B)
    D   time of drafting, in plain steps: k steps of a draft model; nothing for n-grams
    h   time of the host for it, in plain steps: looking n-grams up, comparing, counting

Where the time is that of reading weights, positions to verify are almost free, and v is near 1.
Where operations bind, v grows with every position. So the same drafts gain at one batch size and
lose at another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from operator import mul

from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.plan.cost import StepCost, step_cost

StepSeconds = Callable[[int, int], float]  # of (sequences, drafts of all of them to verify)
CostSeconds = Callable[[StepCost], float]  # `cost.step_time` or `decode_law.decode_time`


@dataclass(frozen=True)
class Speculation:
    """What to expect of `num_drafts` drafts per sequence.

    Attributes:
        batch: sequences that decode together.
        tokens: new tokens of a sequence per step (E).
        verification, drafting, host: time of these parts, in plain steps (v, D, h).
    """

    batch: int
    num_drafts: int
    tokens: float
    verification: float
    drafting: float
    host: float

    @property
    def step(self) -> float:
        """Time of a step, in plain steps."""
        return self.verification + self.drafting + self.host

    @property
    def speedup(self) -> float:
        """Tokens per second over those of plain decoding."""
        return self.tokens / self.step


def survival(acceptance: Sequence[float], num_drafts: int) -> list[float]:
    """For each draft the probability that it is accepted: that of its place times those before.

    Args:
        acceptance: by place, the probability that a draft is accepted if all before it are; the
            last one also holds for the places behind it.
    """
    for rate in acceptance:
        if not (isfinite(rate) and 0 <= rate <= 1):
            raise ConfigError(f"acceptance has {rate}; it must be numbers from 0 to 1.")
    if not acceptance:
        raise ConfigError("acceptance is empty; it must be at least one number from 0 to 1.")
    rates = [acceptance[min(place, len(acceptance) - 1)] for place in range(num_drafts)]
    return list(accumulate(rates, mul))


def speculation(
    batch: int,
    num_drafts: int,
    acceptance: Sequence[float],
    seconds: StepSeconds,
    *,
    answered: float = 1.0,
    draft_seconds: float = 0.0,
    host_seconds: float = 0.0,
) -> Speculation:
    """Predict `num_drafts` drafts for each of `batch` sequences.

    Args:
        answered: probability that there are drafts for a sequence at all; an n-gram may be new.
        draft_seconds: of one step of the draft model for the whole batch.
        host_seconds: of everything else that drafts need in a step.
    """
    if batch < 1 or num_drafts < 0 or not 0 <= answered <= 1:
        raise ConfigError(
            f"batch is {batch}, num_drafts is {num_drafts} and answered is {answered}; they must "
            "be at least 1, at least 0, and from 0 to 1."
        )
    plain = seconds(batch, 0)
    some = 1 - (1 - answered) ** batch if num_drafts else 0.0  # of steps with any drafts
    verifying = plain
    if some:
        verifying = seconds(batch, round(batch * num_drafts * answered / some))
    return Speculation(
        batch,
        num_drafts,
        1 + answered * sum(survival(acceptance, num_drafts)),
        1 - some + some * verifying / plain,
        num_drafts * draft_seconds / plain,
        host_seconds / plain if num_drafts else 0.0,
    )


def best(predictions: Sequence[Speculation]) -> Speculation | None:
    """The fastest of them; None where plain decoding is."""
    fastest = max(predictions, key=lambda each: each.speedup, default=None)
    return fastest if fastest is not None and fastest.speedup > 1 else None


def verification_seconds(
    config: ModelConfig, context: int, time: CostSeconds, dtype: str | None = None
) -> StepSeconds:
    """The step of a model in which every sequence has `context` tokens, its drafts among them; each
    drafted position has logits of its own."""

    def seconds(batch: int, drafts: int) -> float:
        each, more = divmod(drafts, batch)
        query_lens = [1 + each + (place < more) for place in range(batch)]
        num_logits = batch + drafts
        return time(
            step_cost(config, query_lens, [context] * batch, num_logits=num_logits, dtype=dtype)
        )

    return seconds
