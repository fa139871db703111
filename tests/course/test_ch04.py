"""Chapter 04: its own functions, what it says about seeds, the claims of category D recomputed."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch

from minillm.config import ModelConfig
from minillm.lab.roofline import step_cost
from minillm.lab.training.variants import MLA, VARIANTS
from minillm.models.decoder import Decoder
from minillm.models.presets import preset
from minillm_exercises.chapters import ch04, ch04_variants
from minillm_exercises.chapters.ch04_variants import Record, Run, Verdict
from minillm_exercises.errors import ExerciseError

DEEPSEEK, LLAMA = preset("deepseek-v2"), preset("llama-3.1-70b")
KEPT = {"mha": 4096, "gqa": 1024, "mqa": 512, "mla": 1024}


def small(name: str) -> ModelConfig:
    """A variant's attention in a model of one narrow layer."""
    return replace(VARIANTS[name], num_layers=1, vocab_size=64, intermediate_size=16)


def random_model(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(small(name), dtype)
    model.initialize(0.1)
    return model.eval()


def recorded(bits: dict[str, tuple[float, ...]], text: str = "stdlib") -> Record:
    """A record in which seed n of a variant has its n-th bits per byte."""
    runs = [
        Run(name, seed, 1000, KEPT[name], {text: value})
        for name, values in bits.items()
        for seed, value in enumerate(values)
    ]
    return Record(tuple(runs), 4096, {text: 100})


def test_made_counts_new_tensors_and_no_views():
    x = torch.empty(4, 8, device="meta")
    with ch04.made() as found:
        x.view(8, 4).T[:2].unsqueeze(0)
    assert (found.num_bytes, found.largest) == (0, 0)
    with ch04.made() as found:
        (x + 1) @ torch.empty(8, 16, device="meta")
    assert found.num_bytes == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    assert found.largest == 4 * 8 * 16


def test_forms_agree_with_the_cost_model_of_the_engine():
    """The engine absorbs: its attention is the form without the two products per head."""
    for queries, seq in ((1, 4096), (7, 300), (64, 64)):
        found = ch04.forms(DEEPSEEK, queries, seq)["keep latents, absorb"]
        cost = step_cost(DEEPSEEK, [queries], [seq])
        up = 2 * queries * DEEPSEEK.num_layers * 128 * 512 * (128 + 128)
        assert found.operations == cost.attention_flops + up
        assert found.num_bytes - cost.kv_read_bytes == up // queries


def test_the_weights_taken_apart_are_those_of_the_engine():
    model = random_model("mla", torch.float64)
    w = ch04.latent_weights(model)
    part = model.layers[0].attention
    assert w.widths == (8, MLA.qk_nope_head_dim, MLA.qk_rope_head_dim, MLA.kv_lora_rank)
    assert torch.equal(torch.cat((w.uk, w.uv), 1).flatten(0, 1), part.kv_b_proj.weight)
    assert torch.equal(w.q, part.q_proj.weight)
    assert torch.equal(w.down, part.kv_a_proj.weight)
    assert torch.equal(w.norm, part.kv_a_norm.weight)
    assert torch.equal(w.out, part.o_proj.weight)
    assert torch.allclose(w.frequencies.float(), model.rope.frequencies)


def test_the_first_layer_is_run_on_the_tokens_it_is_given():
    model = random_model("mla")
    x, out = ch04.first_layer(model, [5, 6, 7])
    other, changed = ch04.first_layer(model, [5, 6, 8])
    assert x.shape == out.shape == (3, 256)
    assert torch.equal(x[:2], other[:2])
    assert torch.allclose(out[:2], changed[:2], atol=1e-6)
    assert not torch.allclose(out[2], changed[2], atol=1e-4)


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


def test_only_common_seeds_are_compared_and_all_of_them_make_the_spread():
    found = verdict((1.30, 1.31, 1.20), (1.40, 1.41))
    assert len(found.differences) == 2
    assert found.spread == pytest.approx(0.11)
    assert not found.apart
    with pytest.raises(ExerciseError, match="no seed in common"):
        ch04_variants.judge(
            Record((Run("mha", 0, 1, 2, {"t": 1.0}), Run("mqa", 1, 1, 1, {"t": 1.0})), 1, {"t": 1}),
            "t",
        )


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


def test_what_norms_are_worth_is_measured_from_the_same_seeds():
    record = recorded({"mha": (1.0, 1.25, 1.5), "mqa": (1.5,), "mla": (2.0, 1.0)})
    controls = tuple(
        Run("mha-plain", n, 1000, 512, {"stdlib": b}) for n, b in ((0, 1.5), (2, 1.75))
    )
    record = replace(record, controls=controls)
    assert record.worth_of_norms("stdlib") == (0.5 + 0.25) / 2
    record = replace(record, controls=controls[:1])
    assert record.below_plain("mla", "stdlib") == 1.5 - 2.0
    assert record.widest("stdlib") == 0.25  # of the means 1.25, 1.5 and 1.5
