"""Chapter 20's timetables, by hand and by the formulas."""

from fractions import Fraction

import pytest

from minillm.models.presets import preset
from minillm_exercises.chapters import ch20


def test_a_timetable_by_hand():
    """Costs 1, 3, 1 on two stages: the third plan waits for the second."""
    boxes = ch20.rounds_of([1, 3, 1], 2, 1)
    found = [(box.plan, box.stage, box.start, box.end) for box in boxes]
    assert found == [
        *((0, 0, 0, 1), (0, 1, 1, 2)),
        *((1, 0, 1, 4), (1, 1, 4, 7)),
        *((2, 0, 4, 5), (2, 1, 7, 8)),
    ]
    assert ch20.busy(boxes, 2) == Fraction(10, 16)
    assert ch20.busy(boxes, 2, 1, 4) == Fraction(4, 6)


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_the_two_formulas(stages):
    """min(1, m / p) for plans that go round, m / (m + p - 1) for chunks."""
    for plans in (1, 2, 3, 4, 9):
        assert ch20.steady([1] * plans, stages) == min(Fraction(1), Fraction(plans, stages))
        chunks = ch20.busy(ch20.rounds_of([1] * plans, stages, 1), stages)
        assert chunks == Fraction(plans, plans + stages - 1)


def test_cuts():
    qwen = preset("qwen3-0.6b")
    head = ch20.head_in_layers(qwen)
    d = qwen.hidden_size
    layer = d * 128 * (16 + 8 + 8 + 16) + 3 * d * qwen.intermediate_size
    assert head == Fraction(qwen.vocab_size * d, layer)
    assert ch20.by_cost(qwen, 2) == [19, 9]
    assert ch20.equal_counts(28, 3) == [10, 9, 9]
    assert ch20.stage_costs([14, 14], head) == [14, 14 + head]
    best = max(ch20.stage_costs(ch20.by_cost(qwen, 2), head))
    assert all(best <= max(ch20.stage_costs([n, 28 - n], head)) for n in range(1, 28))


def test_plans_in_flight():
    steps = ch20.in_flight(ch20.planner(4, [2] * 8), 3)
    assert ch20.plans_table(steps, 4)[1] == ["1", "a b", "c d", "e f", "g h"]
    assert ch20.plans_table(steps, 4)[2] == ["2", "c d", "e f", "g h", "a b"]
    assert all(plans == [((0, 1),)] for plans in ch20.in_flight(ch20.planner(4, [2]), 4)[1:])
    chunks = ch20.in_flight(ch20.planner(4, [256], budget=64), 1)
    assert ch20.plans_table(chunks, 4) == [["0", *["a: 64"] * 4]]
