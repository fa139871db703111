"""Measure again what other programs disturbed: chosen by what they did, not by how long it took."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import sleep
from typing import Generic, TypeVar

from minillm.lab.benchmarks.others import DISTURBED, watching

T = TypeVar("T")
TRIES = 3
PATIENCE = 1.0  # seconds before another try: what disturbs lasts
LEAST_SECONDS = 0.25  # of a measurement, for others to be seen


@dataclass(frozen=True)
class Calm(Generic[T]):
    """What was measured, and the share of the processors that others used meanwhile."""

    value: T
    others: float


def calmly(run: Callable[[], T]) -> Calm[T]:
    """The first undisturbed run, or the least disturbed of `TRIES`."""
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
    """The undisturbed rounds, or, where there is none, the least disturbed one."""
    calm = [each for each in rounds if each.others <= DISTURBED]
    return calm or [min(rounds, key=lambda each: each.others)]
