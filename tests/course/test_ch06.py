"""Chapter 06's arithmetic beside the engine, and the bound of what an order can gain."""

from fractions import Fraction
from itertools import product
from random import Random

import pytest

from minillm.lab.simulation import linear
from minillm.scheduling.scheduler import Scheduler
from minillm_exercises.chapters import ch06
from minillm_exercises.chapters.ch06 import StaticScheduler, serve

SIX = {"A": 12, "B": 4, "C": 8, "D": 6, "E": 9, "F": 3}
KINDS = {"static": StaticScheduler, "continuous": Scheduler}
ARITHMETIC = {"static": ch06.static_ends, "continuous": ch06.continuous_ends}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dist", "seats"), product(ch06.DISTS, (1, 3, 8)))
def test_the_engine_ends_every_request_when_the_arithmetic_says(kind, dist, seats):
    lengths = ch06.draw(dist, 30, scale=20)
    trace = serve(lengths, seats, KINDS[kind])
    said = ARITHMETIC[kind](lengths, seats)
    assert ch06.ends(trace) == {str(n): end for n, end in enumerate(said)}
    assert len(trace) == max(said)


def test_no_order_gains_more_than_the_bound():
    chance = Random(7)
    for _ in range(200):
        lengths = [chance.randint(1, 40) for _ in range(chance.randint(1, 30))]
        seats = chance.randint(1, 9)
        assert ch06.gain(lengths, seats) <= ch06.most_gain(lengths, seats)
        least = Fraction(sum(lengths), seats)
        assert max(ch06.continuous_ends(lengths, seats)) < least + max(lengths)


def test_a_disturbed_step_does_not_show_in_the_gain():
    seconds = linear(1.0, 0.25)
    runs = [list(serve(SIX, ch06.Room(3, seconds=seconds), kind)) for kind in KINDS.values()]
    runs[0][5].delivered += 100  # one of four steps with two rows
    by_rows = ch06.seconds_by_rows(runs)
    assert by_rows == {1: 1.25, 2: 1.5, 3: 1.75}
    assert ch06.clock_gain(*runs, by_rows) == (21 + 42 / 4) / (17 + 42 / 4)
