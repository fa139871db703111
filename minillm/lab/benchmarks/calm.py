"""Repeats measurements that other programs disturbed.

Runs are selected by the processor use of other programs, never by their own duration."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import sleep
from typing import Generic, TypeVar

from minillm.lab.benchmarks.others import DISTURBED, watching

T = TypeVar("T")
TRIES = 3
PATIENCE = 1.0  # seconds before another try
LEAST_SECONDS = 0.25  # shortest measurement in which other programs can be detected


@dataclass(frozen=True)
class Calm(Generic[T]):
    """A measured value, and the fraction of the processors that other programs used meanwhile."""

    value: T
    others: float


def calmly(run: Callable[[], T]) -> Calm[T]:
    """The first undisturbed run, or the least disturbed of `TRIES` runs."""
    found: list[Calm[T]] = []
    for number in range(TRIES):
        if number:
            sleep(PATIENCE)
        with watching([]) as watch:
            value = run()
        found.append(Calm(value, watch.share))
        if watch.share <= DISTURBED:
            break
    return min(found, key=lambda one: one.others)


def calmest(rounds: Sequence[Calm[T]]) -> list[Calm[T]]:
    """The undisturbed rounds; if there are none, the least disturbed round."""
    calm = [each for each in rounds if each.others <= DISTURBED]
    return calm or [min(rounds, key=lambda each: each.others)]
