"""Chapter 20's own functions: timetables, plans in flight, boundaries, cuts, prices, experts."""

from fractions import Fraction

import pytest

from minillm import LLM
from minillm.models.presets import preset
from minillm.scheduling import scheduler as scheduler_file
from minillm_exercises.chapters import ch20

# Timetables ------------------------------------------------------------------------------------


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


def test_plans_in_flight():
    steps = ch20.in_flight(ch20.planner(4, [2] * 8), 3)
    assert ch20.plans_table(steps, 4)[1] == ["1", "a b", "c d", "e f", "g h"]
    assert ch20.plans_table(steps, 4)[2] == ["2", "c d", "e f", "g h", "a b"]
    assert all(plans == [((0, 1),)] for plans in ch20.in_flight(ch20.planner(4, [2]), 4)[1:])
    chunks = ch20.in_flight(ch20.planner(4, [256], budget=64), 1)
    assert ch20.plans_table(chunks, 4) == [["0", *["a: 64"] * 4]]


def test_a_virtual_clock_agrees_with_the_formulas():
    for users, want in ((1, 25), (2, 50), (4, 100), (8, 100)):
        boxes = ch20.drive(ch20.planner(4, [2] * users), 4, lambda tokens: 1, 60)
        assert ch20.busy(boxes, 4, 20, 60) == Fraction(want, 100)
    boxes = ch20.drive(ch20.planner(4, [640], budget=64), 4, lambda tokens: 1, 10)
    assert ch20.busy(boxes, 4, 0, 13) == Fraction(10, 13)
    assert ch20.first_token(boxes, 4, 0) == 13


def test_all_in_one_plan_is_there_inside_and_gone_after():
    right = scheduler_file.most_decoding
    with ch20.all_in_one_plan():
        boxes = ch20.drive(ch20.planner(4, [2] * 8), 4, lambda tokens: 1, 60)
    assert ch20.busy(boxes, 4, 20, 60) == Fraction(1, 4)
    assert scheduler_file.most_decoding is right


def test_a_token_sends_one_tensor_across_each_boundary():
    three, one = ch20.open_stages("tiny", 3), LLM("tiny", dtype="float32")
    prompt = one.tokenizer.encode("def f(x):\n")
    assert ch20.sent_per_token(three, prompt, 4) == [(1, 256 * 4)] * 2
    assert ch20.write(three, prompt, 12) == ch20.write(one, prompt, 12)
    three.close()


def test_whole_experts_send_what_slices_send():
    one, sliced, whole = ch20.mixture(), ch20.mixture(2), ch20.mixture(2, whole_experts=True)
    texts = [ch20.write(llm, [5, 6, 7], 12) for llm in (one, sliced, whole)]
    assert texts[0] == texts[1] == texts[2]
    steps, sums, width = 12, 1 + 2 * 3, 64 * 4
    assert ch20.summed(sliced) == ch20.summed(whole) == (steps * sums, (steps + 2) * sums * width)
    sliced.close()
    whole.close()


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
