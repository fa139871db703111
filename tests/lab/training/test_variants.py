"""The four variants of chapter 04: comparable, trained on the same rows, and published whole."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from minillm.cache.spec import cache_spec
from minillm.lab.training import variants
from minillm.lab.training.evaluate import logits_of
from minillm.lab.training.export import export
from minillm.lab.training.trainer import build_model
from minillm.models.checkpoint import open_model
from minillm.models.decoder import Decoder
from minillm.models.loader import load_model

COMMITTED = Path(__file__).parents[3] / "notebooks" / "variants"
IDS = [7 * number % 4096 for number in range(60)]


def parameters(model: Decoder) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def transformers_logits(folder: Path) -> torch.Tensor:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return reference(torch.tensor([IDS])).logits[0]


def largest_difference(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((logits - wanted).abs().max() / wanted.abs().max())


def test_they_are_of_one_size_and_differ_in_their_cache() -> None:
    sizes = [parameters(Decoder(config)) for config in variants.VARIANTS.values()]
    assert min(sizes) >= 2_000_000
    assert max(sizes) <= 3_000_000
    assert max(sizes) / min(sizes) < 1.02
    cached = {
        name: cache_spec(config).block_values(1) for name, config in variants.VARIANTS.items()
    }
    assert cached == {"mha": 512, "gqa": 128, "mqa": 64, "mla": 128}


def test_transformers_reads_what_is_exported(tmp_path: Path) -> None:
    model = build_model(variants.VARIANTS["gqa"], 0)
    model.initialize(std=0.15, seed=1)
    export(model, tmp_path)
    again = load_model(open_model(str(tmp_path)), torch.float32)
    wanted = transformers_logits(tmp_path)
    assert wanted.std() > 0.5
    assert largest_difference(logits_of(again, IDS), wanted) < 1e-5


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_the_committed_weights_are_what_transformers_makes_of_them(name: str) -> None:
    model = load_model(open_model(str(COMMITTED / name)), torch.float32)
    assert largest_difference(logits_of(model, IDS), transformers_logits(COMMITTED / name)) < 1e-5
