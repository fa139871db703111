"""Chapter 04: what it says about seeds, and the claims of category D recomputed."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from minillm.lab.roofline import step_cost
from minillm.models.presets import preset
from minillm_exercises.chapters import ch04, ch04_variants
from minillm_exercises.chapters.ch04_variants import Record, Run, Verdict

DEEPSEEK, LLAMA = preset("deepseek-v2"), preset("llama-3.1-70b")
KEPT = {"mha": 4096, "gqa": 1024, "mqa": 512, "mla": 1024}


def recorded(bits: dict[str, tuple[float, ...]], text: str = "stdlib") -> Record:
    """A record in which seed n of a variant has its n-th bits per byte."""
    runs = [
        Run(name, seed, 1000, KEPT[name], {text: value})
        for name, values in bits.items()
        for seed, value in enumerate(values)
    ]
    return Record(tuple(runs), 4096, {text: 100})


def test_forms_agree_with_the_cost_model_of_the_engine():
    """The engine absorbs: its attention is the form without the two products per head."""
    for queries, seq in ((1, 4096), (7, 300), (64, 64)):
        found = ch04.forms(DEEPSEEK, queries, seq)["keep latents, absorb"]
        cost = step_cost(DEEPSEEK, [queries], [seq])
        up = 2 * queries * DEEPSEEK.num_layers * 128 * 512 * (128 + 128)
        assert found.operations == cost.attention_flops + up
        assert found.num_bytes - cost.kv_read_bytes == up // queries


def verdict(one: tuple[float, ...], other: tuple[float, ...]) -> Verdict:
    (found,) = ch04_variants.judge(recorded({"mha": one, "mqa": other}), "stdlib")
    return found


def test_a_difference_beyond_the_seeds_is_told_in_either_direction():
    found = verdict((1.30, 1.31, 1.29), (1.40, 1.42, 1.41))
    assert found.apart
    assert found.sentence == (
        "MQA needs 0.110 bits per byte more than MHA (0.100 to 0.120 in 3 seeds, "
        "a variant's own seeds differ by up to 0.020)."
    )
    found = verdict((1.40, 1.42, 1.41), (1.30, 1.31, 1.29))
    assert found.apart
    assert found.sentence.startswith("MHA needs 0.110 bits per byte more than MQA (0.100 to 0.120")


@pytest.mark.parametrize(("one", "other", "why"), [
    ((1.30, 1.31, 1.29), (1.31, 1.30, 1.30), "the seeds disagree about the sign"),
    ((1.31, 1.30, 1.30), (1.309, 1.319, 1.319), "one seed says the opposite of the mean"),
    ((1.30, 1.34, 1.26), (1.33, 1.37, 1.29), "they agree, by less than seeds differ"),
    ((1.30, 1.30, 1.30), (1.30, 1.30, 1.30), "there is no difference at all"),
    ((1.30,), (1.90,), "one seed has no spread"),
])  # fmt: skip
def test_what_seeds_cannot_show_is_not_told(one, other, why):
    found = verdict(one, other)
    assert not found.apart, why
    assert "MQA and MHA: not told apart" in found.sentence
    assert "more than" not in found.sentence


def test_equal_variants_are_told_apart_by_chance_as_often_as_a_simulation_by_numpy_says():
    runs = np.random.default_rng(1).normal(size=(40_000, 2, 3))
    differences = runs[:, 1] - runs[:, 0]
    agree = (differences > 0).all(1) | (differences < 0).all(1)
    apart = agree & (abs(differences.mean(1)) > np.ptp(runs, axis=2).max(1))
    assert abs(ch04_variants.false_alarms(3, variants=2) - apart.mean()) < 0.01
    few, more = (ch04_variants.false_alarms(3, variants, cases=2000) for variants in (2, 4))
    assert 2 * few < more < 6 * few


def test_luck_counts_the_orders_in_which_one_variant_wins_throughout():
    for seeds in (1, 2, 3, 4):
        orders = list(combinations(range(2 * seeds), seeds))
        apart = [order for order in orders if order[-1] == seeds - 1 or order[0] == seeds]
        assert ch04_variants.luck(seeds) == Fraction(len(apart), len(orders))
