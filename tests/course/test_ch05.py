"""Chapter 05: its functions by brute force, and the arithmetic of every claim on batching."""

import random
import tomllib
from bisect import bisect_right
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from minillm import LLM
from minillm.lab.simulation import Simulation, every_step, roofline
from minillm.models.presets import preset
from minillm.plan import hardware
from minillm.plan.cost import kv_bytes_per_token, memory_plan, step_time, weight_bytes
from minillm.plan.hardware import DATASHEET, ImpossibleMeasurementError
from minillm_exercises.chapters import ch05
from minillm_exercises.errors import ExerciseError

CLAIMS = Path(__file__).parents[2] / "notebooks" / "claims.toml"
CARD, H100 = DATASHEET["rtx-5070-ti"], DATASHEET["h100-sxm"]
TWICE = replace(CARD, peak_flops=2 * CARD.peak_flops)
QWEN, SMALL = preset("qwen2.5-3b"), preset("smollm2-135m")
WEIGHTS = weight_bytes(QWEN)
SPEEDS = {b: Fraction(t) for b, t in zip(
    (1, 2, 4, 8, 16, 32), ("21.0", "43.2", "90.0", "182.8", "383.6", "701.6"), strict=True,
)}  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny", dtype="float32", device="cpu", enforce_eager=True)


# ---- the chapter's functions -------------------------------------------------------------------


def test_a_hollow_model_makes_the_same_calls_with_hardly_any_weights(tiny):
    twin = ch05.hollow(tiny, dtype="float32", device="cpu", max_model_len=64, enforce_eager=True)
    sizes = [sum(p.numel() for p in llm.engine.forward_pass.model.parameters())
             for llm in (tiny, twin)]  # fmt: skip
    assert sizes[1] < sizes[0] / 4
    for batch in (1, 3):
        assert ch05.count_calls(twin, batch) == ch05.count_calls(tiny, batch)
    caches = [kv_bytes_per_token(llm.engine.source.config, "float32") for llm in (tiny, twin)]
    assert caches[0] == caches[1]


def test_the_products_of_a_batch_are_those_that_are_counted(tiny):
    from torch.utils.flop_counter import FlopCounterMode

    model = tiny.engine.forward_pass.model
    with FlopCounterMode(display=False) as counter:
        logits = ch05.product_pass(model, 5, 5)()
    assert logits.shape == (5, model.config.vocab_size)
    assert counter.get_total_flops() == ch05.decode_cost(model.config, 5, 1).linear_flops


@pytest.mark.parametrize("context", [1, 200, 1024, 1500])
@pytest.mark.parametrize("machine", [CARD, TWICE, DATASHEET["laptop-ddr5"]])
def test_turn_is_the_first_batch_whose_operations_take_as_long(machine, context):
    def computes(batch: int) -> bool:
        time = step_time(ch05.decode_cost(QWEN, batch, context), machine)
        return time.compute_seconds >= time.memory_seconds

    at = ch05.turn(QWEN, machine, context)
    if at is None:
        assert not any(computes(2**power) for power in range(14))
    else:
        assert computes(at)
        assert at == 1 or not computes(at - 1)


def test_no_batch_turns_beyond_the_longest_context():
    longest = ch05.longest_turning(QWEN, CARD)
    assert longest == 1856
    assert ch05.turn(QWEN, CARD, longest) is not None
    assert ch05.turn(QWEN, CARD, longest + 1) is None
    time = step_time(ch05.decode_cost(QWEN, 2**14, 4096), CARD)
    assert time.memory_seconds > 2 * time.compute_seconds
    assert ch05.longest_turning(preset("llama-3.1-8b"), H100) == 392


def test_experts_are_refused():
    with pytest.raises(ExerciseError, match="dense"):
        ch05.turn(preset("mixtral-8x7b"), H100, 1)


# ---- the claims --------------------------------------------------------------------------------


def test_every_claim_on_batching_is_listed():
    claims = tomllib.loads(CLAIMS.read_text("utf-8"))
    for name in [*(f"F{number}" for number in range(1, 10)), "F24", "F25"]:
        assert set(claims[name]) >= {"text", "figures", "verdict"}, name


@pytest.mark.parametrize(
    ("context", "worth"), [(0, "32.0"), (256, "30.5"), (1024, "26.8"), (4096, "17.9"),
                           (16384, "7.7")]
)  # fmt: skip
def test_f1_a_batch_of_32_is_worth_32_tokens_only_with_empty_caches(context, worth):
    moved = WEIGHTS + 32 * context * kv_bytes_per_token(QWEN)
    assert ch05.rounded([Fraction(32 * WEIGHTS, moved)]) == worth
    if context:
        cost = ch05.decode_cost(QWEN, 32, context)  # the same, but for what is written and embedded
        assert cost.total_bytes == pytest.approx(moved, rel=1e-3)


def test_f2_the_divisions_reproduce_and_the_gain_is_more_than_sharing_brings():
    said = [100 * speed * 6 / 504 for speed in SPEEDS.values()]
    assert ch05.rounded(said, 0) == "25, 51, 107, 218, 457, 835"
    assert SPEEDS[32] / SPEEDS[1] > 32
    assert ch05.rounded([SPEEDS[32] / SPEEDS[1]]) == "33.4"


def test_f3_the_weights_are_read_once_per_step():
    read = [WEIGHTS * speed / batch for batch, speed in SPEEDS.items()]
    assert ch05.rounded(read, 0, 10**9) == "130, 133, 139, 141, 148, 135"
    shares = [100 * rate / Fraction(CARD.bandwidth) for rate in read]
    assert ch05.rounded([min(shares), max(shares)]) == "14.5, 16.5"
    seconds = float(32 / SPEEDS[32])
    with pytest.raises(ImpossibleMeasurementError, match=r"4\.83 times"):
        hardware.check_physical(0, 32 * WEIGHTS, seconds, CARD)
    hardware.check_physical(0, WEIGHTS, seconds, CARD)


def test_f4_a_cache_of_48_mb_serves_no_scan_of_the_weights():
    assert ch05.rounded([Fraction(100 * 48 * 10**6, WEIGHTS)]) == "0.8"
    kept: dict[int, None] = {}  # least recently used first; a cache of 10 against a scan of 1,000
    hits = 0
    for piece in list(range(1000)) * 3:
        hits += piece in kept
        kept.pop(piece, None)
        kept[piece] = None
        if len(kept) > 10:
            del kept[next(iter(kept))]
    assert hits == 0


def test_f5_tensor_cores_move_no_bytes_and_were_hardly_used():
    rate = ch05.decode_cost(QWEN, 32, 1).flops * SPEEDS[32] / 32
    assert ch05.rounded([rate], 1, 10**12) == "4.3"
    assert rate / Fraction(CARD.peak_flops) < Fraction(5, 100)


def test_f6_sharing_the_weights_is_the_whole_explanation():
    one, many = (ch05.decode_cost(QWEN, batch, 1) for batch in (1, 32))
    assert many.weight_bytes - one.weight_bytes == 31 * 2 * QWEN.hidden_size  # embedding rows
    assert 32 * one.total_bytes / many.total_bytes == pytest.approx(32, rel=1e-3)


def test_f7_the_growth_that_is_left_out_contradicts_the_story():
    speeds = list(SPEEDS.values())
    growth = [100 * (b / a - 1) for a, b in pairwise(speeds)]
    assert ch05.rounded(growth) == "105.7, 108.3, 103.1, 109.8, 82.9"
    assert max(growth) == growth[3]


def test_f8_steps_are_flat_and_operations_would_take_over_at_the_ridge():
    steps = {batch: 1000 * batch / speed for batch, speed in SPEEDS.items()}
    assert ch05.rounded(list(steps.values())) == "47.6, 46.3, 44.4, 43.8, 41.7, 45.6"
    mean_b, mean_t = Fraction(sum(steps), 6), sum(steps.values()) / 6
    slope = sum((b - mean_b) * (t - mean_t) for b, t in steps.items()) / sum(
        (b - mean_b) ** 2 for b in steps
    )
    assert abs(slope) < Fraction(6, 100)  # ms per sequence: it does not grow
    assert all(step > 6 * 1000 * WEIGHTS / Fraction(CARD.bandwidth) for step in steps.values())
    assert (int(CARD.ridge()), int(TWICE.ridge())) == (98, 196)
    assert (ch05.turn(QWEN, CARD, 1), ch05.turn(QWEN, TWICE, 1)) == (99, 197)


def test_f9_no_share_of_the_bandwidth_tells_what_a_step_is_bound_by():
    """At every batch of the table operations take less time than bytes, 835 percent or not."""
    for batch in SPEEDS:
        time = step_time(ch05.decode_cost(QWEN, batch, 1), CARD)
        assert time.compute_seconds < time.memory_seconds


def test_f24_a_batch_that_is_chosen_anew_makes_nobody_wait_longer_than_a_step():
    sim = Simulation(1000, seconds=roofline(QWEN, CARD))
    for number in range(8):
        sim.add(prompt=100, new=50, arrival=number / 10)
    waits = [request.queue_time for request in sim.run().requests()]
    steps = [step.delivered - step.started for step in sim.trace]
    assert max(waits) < max(steps) < 0.010
    full = Simulation(1000, seconds=every_step(), max_num_seqs=1)
    for _ in range(2):
        full.add(prompt=4, new=5)
    assert [request.queue_time for request in full.run().requests()] == [0, 5]


@pytest.mark.parametrize("context", [1024, 4096, 16384])
def test_f25_the_planned_batch_is_what_the_scheduler_runs(context):
    plan = memory_plan(QWEN, CARD.memory_bytes)
    (fits,) = [fit.batch for fit in plan.combinations if fit.context == context]
    assert fits == plan.num_tokens // context
    limits = {"max_num_seqs": 512, "max_num_batched_tokens": 2**18}
    for watermark, kept in ((0.0, 0), (0.01, plan.num_tokens // 100)):  # the default keeps some
        sim = Simulation(plan.num_tokens // 16, watermark=watermark, **limits)
        for _ in range(fits + 3):
            sim.add(prompt=context - 8, new=8)
        sim.run()
        running = sim.scheduler.counters.max_num_running
        assert fits - (kept // context + 1) * bool(kept) <= running <= fits


def test_f25_the_patient_batch_meets_its_target():
    rng = random.Random(5)
    for _ in range(5):
        context, target = rng.randint(100, 8000), rng.uniform(0.008, 0.03)
        times = [step_time(ch05.decode_cost(QWEN, b, context), CARD).seconds for b in range(1, 300)]
        largest = bisect_right(times, target)
        assert all(time <= target for time in times[:largest])
        assert largest == len(times) or times[largest] > target


def test_batched_logits_equal_those_alone(tiny):
    """What the chapter says of texts, of logits: rows of others change nothing but roundings."""
    from minillm.models.forward_pass import Chunk

    by_hand, rng = tiny.engine.forward_pass, random.Random(3)
    prompts = [[rng.randrange(4096) for _ in range(n)] for n in (3, 11, 1, 7)]
    chunks = [Chunk(number, 0, prompt) for number, prompt in enumerate(prompts)]
    _, together = by_hand.run(chunks, by_hand.allocate(4, 11))
    for row, prompt in zip(together, prompts, strict=True):
        _, alone = by_hand.run([Chunk(0, 0, prompt)], by_hand.allocate(1, 11))
        torch.testing.assert_close(row, alone[0], rtol=1e-4, atol=1e-4)
