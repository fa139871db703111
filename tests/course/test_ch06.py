"""Chapter 06's own functions, and the claims about batching that can be computed again."""

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


def test_six_requests_by_hand():
    assert ch06.static_ends(list(SIX.values()), 3) == [12, 4, 8, 18, 21, 15]
    assert ch06.continuous_ends(list(SIX.values()), 3) == [12, 4, 8, 10, 17, 13]


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


def test_a_dist_has_its_mean_and_a_seed_its_draw():
    for dist in ch06.DISTS:
        lengths = ch06.draw(dist, 20_000)
        assert abs(sum(lengths) / len(lengths) - ch06.MEAN) < 5
        assert lengths[:50] == ch06.draw(dist, 50)
        assert min(ch06.draw(dist, 500, scale=1000)) == 1
    assert ch06.draw("uniform", 9, seed=1) != ch06.draw("uniform", 9, seed=2)
    assert set(ch06.uniform(200, 3, 5)) == {3, 4, 5}
    cut = ch06.exponential(2000, 50, 100)
    assert max(cut) == 100
    assert 40 < sum(cut) / len(cut) < 46  # 50 * (1 - exp(-2)) = 43.2


def test_static_seats_are_offered_when_the_batch_is_over():
    trace = serve(SIX, 3, StaticScheduler, prompt=5)
    assert [record.step for record in trace if record.admitted] == [1, 13]
    assert [record.blocked.what for record in trace if record.blocked] == ["batch slots"] * 12
    assert [record.step for record in serve(SIX, 3, prompt=5) if record.admitted] == [1, 5, 9, 11]


def test_a_room_has_its_blocks_and_its_times():
    trace = serve(SIX, ch06.Room(3, seconds=linear(2.0, 0.0)), prompt=40)
    assert trace[-1].computed == 2 * len(trace)
    few = serve(SIX, ch06.Room(3, blocks=4), prompt=20)  # two blocks each
    assert max(len(record.rows) for record in few) == 2
    assert set(ch06.ends(few)) == set(SIX)


def test_load_by_hand():
    trace = serve([3, 2, 2], 2, arrivals=[0, 0, 1])  # the third waits from 1 to 2
    found = ch06.load(trace, 2)
    assert found == ch06.Load(Fraction(7, 4), Fraction(3, 4), Fraction(1, 3))
    late = ch06.load(serve([1, 1], 1, arrivals=[0, 3]), 1)  # nobody is there for two of four steps
    assert late == ch06.Load(Fraction(1, 2), Fraction(1, 2), Fraction(0))


def test_a_disturbed_step_does_not_show_in_the_gain():
    seconds = linear(1.0, 0.25)
    runs = [list(serve(SIX, ch06.Room(3, seconds=seconds), kind)) for kind in KINDS.values()]
    runs[0][5].delivered += 100  # one of four steps with two rows
    by_rows = ch06.seconds_by_rows(runs)
    assert by_rows == {1: 1.25, 2: 1.5, 3: 1.75}
    assert ch06.clock_gain(*runs, by_rows) == (21 + 42 / 4) / (17 + 42 / 4)
