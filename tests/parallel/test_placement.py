"""Placements of experts: every expert somewhere, equally many slots, even loads."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import ConfigError
from minillm.parallel.placement import (
    Placement,
    check_redundant,
    copies,
    first_placement,
    pack,
    place,
)


@st.composite
def cases(draw):
    """Loads, ranks, redundant experts: all that `check_redundant` lets in."""
    num_experts, num_ranks = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    first, most = -num_experts % num_ranks, num_experts * (num_ranks - 1)
    num_redundant = draw(st.sampled_from(range(first, max(most, first) + 1, num_ranks)))
    loads = st.lists(st.integers(0, 30), min_size=num_experts, max_size=num_experts)
    return draw(loads), num_ranks, min(num_redundant, most)


def is_valid(placement: Placement, num_experts: int, num_ranks: int, num_redundant: int) -> bool:
    """Equally many slots, every expert, and none twice on a rank."""
    each = (num_experts + num_redundant) // num_ranks
    shape = [len(held) for held in placement.slots] == [each] * num_ranks
    alone = all(len(set(held)) == each for held in placement.slots)
    return (
        shape and alone and {e for held in placement.slots for e in held} == {*range(num_experts)}
    )


@settings(max_examples=150, deadline=None)
@given(cases())
def test_a_placement_has_every_expert_and_no_rank_has_one_twice(case):
    loads, num_ranks, num_redundant = case
    found = place(loads, num_ranks, num_redundant)
    assert is_valid(found, len(loads), num_ranks, num_redundant)
    assert sum(map(len, found.copies)) == len(loads) + num_redundant
    first = first_placement(len(loads), num_ranks, num_redundant)
    assert is_valid(first, len(loads), num_ranks, num_redundant)
    assert found == place([8 * load for load in loads], num_ranks, num_redundant)
    assert sum(found.rank_loads(loads)) == pytest.approx(sum(loads))


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 99))
def test_rows_take_the_copies_of_their_expert_in_turn(case, row):
    loads, *sizes = case
    found = place(loads, *sizes)
    for expert, held in enumerate(found.copies):
        taken = [found.copy_of(expert, row + turn) for turn in range(len(held))]
        assert sorted(taken) == sorted(held)
        assert all(found.slots[rank][slot] == expert for rank, slot in taken)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_what_stays_on_a_rank_keeps_its_slot_and_what_comes_is_sent_once(case):
    loads, *sizes = case
    now, wanted = first_placement(len(loads), *sizes), place(loads, *sizes)
    to = wanted.settled(now)
    assert [sorted(held) for held in to.slots] == [sorted(held) for held in wanted.slots]
    come = set()
    for old, new in zip(now.slots, to.slots, strict=True):
        assert all(new[slot] == each for slot, each in enumerate(old) if each in new)
        come |= set(new) - set(old)
    sent = [now.slots[rank][slot] for rank, each in enumerate(now.sent(to)) for slot in each]
    assert sorted(sent) == sorted(come)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_each_copy_goes_to_the_largest_load_per_copy(case):
    loads, num_ranks, num_redundant = case
    counts = [copies(loads, spares, num_ranks) for spares in range(num_redundant + 1)]
    for before, after in pairwise(counts):
        (grown,) = [e for e, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        rest = [load / n for load, n in zip(loads, before, strict=True) if n < num_ranks]
        assert loads[grown] / before[grown] == max(rest)
        assert max(after) <= num_ranks


def test_by_hand():
    found = place([8, 2, 1, 1], 2, 2)
    assert found.slots == ((0, 1, 2), (0, 1, 3))
    assert found.rank_loads([8, 2, 1, 1]) == [6, 6]
    assert found.copies == (((0, 0), (1, 0)), ((0, 1), (1, 1)), ((0, 2),), ((1, 2),))
    assert [found.copy_of(0, row) for row in range(3)] == [(0, 0), (1, 0), (0, 0)]
    assert first_placement(6, 4, 2).slots == ((0, 1), (2, 3), (4, 5), (0, 1))
    assert first_placement(4, 2).balance([8, 2, 1, 1]) == 0.6
    assert place([0, 0, 0, 0], 2, 2).balance([0, 0, 0, 0]) == 1.0


@settings(max_examples=200, deadline=None)
@given(cases(), st.data())
def test_copies_are_packed_whatever_their_loads(case, data):
    """Also small ones that come last, when few ranks have room."""
    loads, num_ranks, _ = case
    counts = [data.draw(st.integers(1, num_ranks)) for _ in loads]
    while sum(counts) % num_ranks:
        counts[counts.index(min(counts))] += 1
    found = pack([load * load * load for load in loads], counts, num_ranks)
    assert is_valid(found, len(loads), num_ranks, sum(counts) - len(loads))
    assert [len(held) for held in found.copies] == counts


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ((8, 2, 1), "8 experts on 2 ranks it can be 0, 2, 4 .. 8"),
        ((8, 3, 0), "8 experts on 3 ranks it can be 1, 4, 7 .. 16"),
        ((6, 4, 8), "6 experts on 4 ranks it can be 2, 6, 10 .. 18"),
        ((4, 2, 6), "4 experts on 2 ranks it can be 0, 2, 4"),
    ],
)
def test_redundant_experts_that_leave_ranks_unequal_are_refused(sizes, what):
    with pytest.raises(ConfigError, match=f"{what}[.]$"):
        check_redundant(*sizes)
