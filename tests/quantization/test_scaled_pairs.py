"""Scaling channels does not change the model. AWQ on planted outlier channels."""

import copy
import inspect
from functools import partial

import pytest
import torch

from minillm.lab.quantise import making, scaled_pairs
from minillm.lab.quantise.calibration import Calibration, layer_of
from minillm.lab.quantise.calibration_text import calibration_windows
from minillm.lab.quantise.grid import Grid, round_to_grid
from minillm.lab.quantise.quantize_layers import quantized_model
from minillm.lab.quantise.recipe import Recipe
from minillm.layers.moe import MoE
from minillm.models.checkpoint import open_model
from minillm.models.families import FAMILIES
from minillm.models.loader import load_model
from minillm.text.tokenizer import Tokenizer
from tests.models.conftest import checkpoint_of  # noqa: F401
from tests.models.parity import FlatRunner, whole
from tests.models.tiny import Tiny, prompt

F32 = torch.float32
WINDOWS = torch.randint(128, (4, 24), generator=torch.Generator().manual_seed(7))
MHA = Tiny("llama", {"num_key_value_heads": 4})
POST_NORM = Tiny("olmo2", {"num_key_value_heads": 4})


logits = partial(whole, ids=prompt(20))  # [20, V]


def change(source, only_norms: bool = False) -> float:
    """Relative change of the logits after all pairs are scaled by random numbers."""
    model = load_model(source, F32)
    before, generator = logits(model), torch.Generator().manual_seed(1)
    calibration = Calibration(model, WINDOWS)
    with torch.no_grad():
        for index in range(len(model.layers)):
            layer = layer_of(model, index)
            recorded = calibration.record(layer)

            def random(weight: torch.Tensor, _: object) -> torch.Tensor:
                return torch.rand(weight.shape[1], generator=generator) * 3 + 0.3

            scaled_pairs.scale_pairs(layer, recorded, random, only_norms)
            fresh = calibration.record(layer)  # inputs really were divided
            for matrix, found in fresh.items():
                for mine, due in zip(recorded[matrix], found, strict=True):
                    assert torch.allclose(mine.products, due.products, rtol=2e-3, atol=1e-3)
            calibration.advance(layer)
    return float((logits(model) - before).abs().max() / before.abs().max())


@pytest.mark.parametrize("case", [MHA, POST_NORM, *FAMILIES], ids=str)
def test_scaled_channels_are_the_same_function(checkpoint_of, case):  # noqa: F811
    assert change(open_model(checkpoint_of(case).folder)) < 1e-4


def test_the_scale_is_stored_before_codes_are_computed():
    """Codes from the exact scale, which is then rounded, would be off by more than half a step."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    found = round_to_grid(weight, Grid(8, False, torch.bfloat16), 256)
    steps = (found.dense() - weight).abs() / found.scales.float()
    assert (steps > 0.501).float().mean() < 0.01  # of the largest, which are cut


def is_moe(layer) -> bool:
    """Whether a layer has experts."""
    return isinstance(layer.mlp, MoE)


def test_an_expert_with_few_tokens_is_rounded(checkpoint_of):  # noqa: F811
    source = open_model(checkpoint_of("qwen3_moe").folder)
    few, rounded = (load_model(source, F32) for _ in range(2))
    quantized_model(few, Recipe("gptq", group_size=8), WINDOWS[:1, :6])
    quantized_model(rounded, Recipe("rtn", group_size=8))
    pairs = [each for each in zip(few.layers, rounded.layers, strict=True) if is_moe(each[0])]
    assert pairs
    for mine, due in pairs:
        assert torch.equal(mine.mlp.experts.down.values(), due.mlp.experts.down.values())
    assert not making.enough(None, 8)


def divergence(model, reference, rows: torch.Tensor) -> float:
    """KL(reference || model) per token."""
    total = 0.0
    for row in rows.tolist():
        ids = torch.tensor(row)
        p, q = (FlatRunner(m, 16, 256, 1).step([(0, ids)])[0].log_softmax(-1)
                for m in (reference, model))  # fmt: skip
        total += float((p.exp() * (p - q)).sum(-1).mean())
    return total / len(rows)


@pytest.mark.slow
def test_awq_protects_planted_outlier_channels():
    """`tiny` with 8 channels of every norm 40 times as large and the next columns as much smaller:
    the same function, but rounding loses the columns."""
    source = open_model("tiny")
    model = load_model(source, F32)
    tokenizer = Tokenizer.from_folder(source.folder)
    rows = calibration_windows(tokenizer, samples=4, length=128, seed=9)
    windows = calibration_windows(tokenizer, samples=16, length=256)
    planted = load_model(source, F32)
    factors = torch.ones(256)
    factors[::32] = 1 / 40
    with torch.no_grad():
        for layer in planted.layers:
            for norm, matrix in (
                (layer.input_norm, layer.attention.qkv_proj),
                (layer.mlp_norm, layer.mlp.gate_up_proj),
            ):
                norm.weight /= factors
                matrix.weight *= factors
    assert divergence(planted, model, rows) < 1e-5
    found = {}
    for name, recipe in (
        ("rtn", Recipe("rtn")),
        ("awq", Recipe("awq", clip=False)),
        ("gptq", Recipe("gptq")),
    ):
        each = copy.deepcopy(planted)
        quantized_model(each, recipe, windows if recipe.calibrated else None)
        found[name] = divergence(each, model, rows)
    assert found["awq"] < 0.5 * found["rtn"], found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "most"), [(Recipe("gptq", group_size=128), 0.025), (Recipe("int8"), 0.0005)]
)
def test_divergence_on_the_embedded_model(recipe, most):
    source = open_model("tiny")
    model, reference = load_model(source, F32), load_model(source, F32)
    tokenizer = Tokenizer.from_folder(source.folder)
    text = inspect.getsource(inspect)  # a held-out module of the standard library
    rows = calibration_windows(tokenizer, text, samples=16, length=256, seed=1)
    quantized_model(model, recipe, calibration_windows(tokenizer) if recipe.calibrated else None)
    assert divergence(model, reference, rows) < most
