"""The speed-up of speculative decoding, predicted from tokens per step and time per step.

    speed-up = E / (v + D + h)

    E   tokens per sequence and step: 1 + the expected number of accepted drafts
    v   time of a verification step over that of a plain step, T(B (k + 1)) / T(B)
    D   time of drafting, in plain steps: k steps of a draft model; 0 for n-grams
    h   host overhead, in plain steps: n-gram lookup, comparison, bookkeeping

A memory-bound step verifies drafts at almost no cost, so v is near 1. In a compute-bound step, v
grows with every position. So the same drafts can be faster at one batch size and slower at another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from operator import mul

from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.lab.roofline import StepCost, step_cost

StepSeconds = Callable[[int, int], float]  # of (sequences, drafts of all of them to verify)
CostSeconds = Callable[[StepCost], float]  # `roofline.step_time` or `decode_law.decode_time`


@dataclass(frozen=True)
class Speculation:
    """A prediction for `num_drafts` drafts per sequence and step.

    Attributes:
        batch: number of sequences.
        tokens: new tokens per sequence and step (E).
        verification, drafting, host: times in plain steps (v, D, h).
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
    """For each draft the probability that it and all drafts before it are accepted.

    Args:
        acceptance: by position, the probability that a draft is accepted given that all drafts
            before it are; the last value also applies to later positions.
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
    """Predict the speed-up of `num_drafts` drafts for each of `batch` sequences.

    Args:
        answered: probability that a sequence has drafts in a step (an n-gram may not be found).
        draft_seconds: time of one step of the draft model for the whole batch.
        host_seconds: host overhead of drafts per step.
    """
    if batch < 1 or num_drafts < 0 or not 0 <= answered <= 1:
        raise ConfigError(
            f"batch is {batch}, num_drafts is {num_drafts} and answered is {answered}; they must "
            "be at least 1, at least 0, and from 0 to 1."
        )
    plain = seconds(batch, 0)
    some = 1 - (1 - answered) ** batch if num_drafts else 0.0  # share of steps with any drafts
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
    """The fastest prediction; None if plain decoding is faster."""
    fastest = max(predictions, key=lambda each: each.speedup, default=None)
    return fastest if fastest is not None and fastest.speedup > 1 else None


def verification_seconds(
    config: ModelConfig, context: int, time: CostSeconds, dtype: str | None = None
) -> StepSeconds:
    """Time of a step in which every sequence has `context` tokens, including its drafts. Each draft
    has its own row of logits."""

    def seconds(batch: int, drafts: int) -> float:
        each, more = divmod(drafts, batch)
        query_lens = [1 + each + (place < more) for place in range(batch)]
        num_logits = batch + drafts
        return time(
            step_cost(config, query_lens, [context] * batch, num_logits=num_logits, dtype=dtype)
        )

    return seconds
