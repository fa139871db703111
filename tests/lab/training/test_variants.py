"""The four variants of chapter 04: comparable, trained on the same rows, and published whole."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from minillm.cache.spec import cache_spec
from minillm.lab.training import variants
from minillm.lab.training.data import TokenStreams
from minillm.lab.training.evaluate import logits_of
from minillm.lab.training.recipes import Recipe
from minillm.lab.training.trainer import RunOptions, Trainer, build_model
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


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_transformers_reads_what_is_exported(name: str, tmp_path: Path) -> None:
    model = build_model(variants.VARIANTS[name], 0)
    model.initialize(std=0.15, seed=1)
    variants.export(model, tmp_path)
    again = load_model(open_model(str(tmp_path)), torch.float32)
    wanted = transformers_logits(tmp_path)
    assert wanted.std() > 0.5
    assert largest_difference(logits_of(again, IDS), wanted) < 1e-5


@pytest.fixture
def streams() -> TokenStreams:
    """Two texts with different rules: count up by 1, and count up by 3."""
    numbers = np.arange(90_000)
    return TokenStreams((numbers % 61).astype(np.uint16), (numbers * 3 % 61).astype(np.uint16))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of two steps."""
    monkeypatch.setattr(variants, "STEPS", 2)

    def recipe(name: str, seed: int) -> Recipe:
        made = original(name, seed, steps=2)
        return replace(made, batch_tokens=512)

    original = variants.variant_recipe
    monkeypatch.setattr(variants, "variant_recipe", recipe)
    manifest = variants.corpus.load_manifest()
    some = tuple(file for file in manifest.files if file.path in ("this.py", "jinja2/constants.py"))
    monkeypatch.setattr(variants.corpus, "load_manifest", lambda: replace(manifest, files=some))


@pytest.mark.usefixtures("short")
def test_the_score_is_that_of_the_published_weights(streams: TokenStreams, tmp_path: Path) -> None:
    recipe = variants.variant_recipe("mla", 0)
    trainer = Trainer(recipe, streams, RunOptions(tmp_path / "work" / recipe.name, compile=False))
    trainer.model.initialize(std=0.15, seed=3)  # so that positions matter
    trainer.step = recipe.steps
    trainer.save()
    variants.publish(tmp_path / "work", tmp_path / "out")
    [run] = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    published = load_model(open_model(str(tmp_path / "out" / "mla")), torch.float32)
    file = next(f for f in variants.corpus.load_manifest().files if f.source == "stdlib")
    score = variants.bits_per_byte(
        published,
        variants.Tokenizer.from_folder(tmp_path / "out" / "mla"),
        [variants.corpus.read(file).decode()],
        variants.WINDOW,
    )
    assert run["bits_per_byte"]["stdlib"] == pytest.approx(score.bits_per_byte, abs=1e-5)
    assert run["parameters"] == parameters(published)


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_the_committed_weights_are_what_transformers_makes_of_them(name: str) -> None:
    model = load_model(open_model(str(COMMITTED / name)), torch.float32)
    assert largest_difference(logits_of(model, IDS), transformers_logits(COMMITTED / name)) < 1e-5
