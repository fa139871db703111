"""Chapter 08's own functions, and when moving is cheaper."""

import pytest

from minillm import LLM
from minillm.lab.hardware import DATASHEET
from minillm.lab.roofline import step_cost
from minillm.lab.simulation import Simulation, linear
from minillm.models.presets import preset
from minillm.plan.cost import kv_bytes_per_token
from minillm_exercises.chapters import ch08, ch08_pictures
from minillm_exercises.errors import ExerciseError

H100, LLAMA, OLD = DATASHEET["h100-sxm"], preset("llama-3.1-8b"), preset("llama-2-7b")


def joined(budget: int, long: int = 4000, **limits: object) -> Simulation:
    """Three chats, and in the third step a long prompt."""
    sim = Simulation(1000, max_num_seqs=8, max_num_batched_tokens=budget, **limits)
    for _ in range(3):
        sim.add(10, 20)
    sim.step()
    sim.step()
    sim.add(long, 4, name="long")
    return sim


def test_live_adds_the_prompt_among_the_chats():
    with LLM("tiny", dtype="float32", device="cpu", max_model_len=128, max_num_seqs=4,
             enable_prefix_caching=False) as llm:  # fmt: skip
        usual, longest = ch08.live(llm, 60, new=9)
        sizes = [sum(row) for row in ch08.rows(llm.trace)]
    assert 0 < usual <= longest
    assert sizes[:5] == [30, 3, 3, 63, 4]


def test_the_crossing_is_the_first_length_at_which_moving_is_cheaper():
    first = ch08.cheaper_from(LLAMA, H100, 25e9)
    for tokens, moves in ((first - 1, False), (first, True), (4 * first, True)):
        assert (ch08.moved(LLAMA, tokens, 25e9) < ch08.again(LLAMA, tokens, H100)) is moves
        assert ch08.cheaper(LLAMA, tokens, H100, 25e9) == ("swap" if moves else "recompute")
    assert ch08.cheaper_from(OLD, H100, 1e9) is None


def test_a_budget_divides_a_prompt_like_the_engine():
    assert ch08_pictures.shares(12, 3, 8) == [5, 5, 2]
    rows = ch08.rows(joined(64, long=200).run())
    assert ch08_pictures.shares(200, 3, 64) == [row[-1] for row in rows[2:] if max(row) > 1]
    with pytest.raises(ExerciseError, match="leaves no token"):
        ch08_pictures.shares(12, 8, 8)


def test_gaps_and_outcome_by_hand():
    sim = Simulation(100, seconds=linear(0, 0.001), max_num_seqs=4)
    sim.add(10, 4, name="chat")  # its tokens come at 10, 11, then with the long prompt, then both
    sim.step()
    sim.step()
    sim.add(100, 2, name="long")
    trace = sim.run()
    assert ch08.gaps(trace, "long") == pytest.approx([0.001, 0.101, 0.002])
    assert ch08.gaps(trace, "chat") == pytest.approx([0.002])
    found = ch08.outcome(trace)
    assert (found.ttft, found.gap, found.done) == pytest.approx((101, 101, 103))


def test_a_full_pool_by_hand():
    # One request, 500 steps of one row: the weights each time, and 100 + 99 + ... slots in all.
    read = 500 * step_cost(LLAMA, [1], [1]).weight_bytes
    kept = (500 * 100 + 499 * 500 // 2) * kv_bytes_per_token(LLAMA)
    most = ch08.full_pool("all", LLAMA, H100, requests=1)
    assert most == pytest.approx(500 * H100.bandwidth / (read + kept))


def test_a_flood_preempts_only_without_a_promise_and_counts_all_steps():
    safe, bold = (
        ch08.flood(name, "all", linear(0, 0.001), requests=12, blocks=100)
        for name in ("reserve_max", "watermark")
    )
    assert (safe.preemptions, safe.again) == (0, 0)
    assert bold.preemptions > 0
    assert bold.again > 0
    computed = 12 * (100 + 500 - 1)
    assert safe.speed == pytest.approx(12 * 500 / (computed * 0.001))
    assert bold.speed == pytest.approx(12 * 500 / ((computed + bold.again) * 0.001))
    assert bold.steps < safe.steps
    assert bold.batch > safe.batch
    assert bold.gap > safe.gap
