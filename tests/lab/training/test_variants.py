"""The four variants of chapter 04: comparable, trained on the same rows, and published whole."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from minillm.cache.spec import cache_spec
from minillm.errors import ConfigError
from minillm.lab.training import variants
from minillm.lab.training.__main__ import parser
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


def test_a_seed_decides_the_rows_whatever_the_variant(streams: TokenStreams) -> None:
    def rows(name: str, seed: int, step: int) -> torch.Tensor:
        recipe = variants.variant_recipe(name, seed)
        return Trainer(recipe, streams, RunOptions(Path(), compile=False)).step_rows(step)

    for step in (0, 700):
        first = rows("mha", 1, step)
        assert first.shape == (16, variants.WINDOW + 1)
        assert all(torch.equal(first, rows(name, 1, step)) for name in ("gqa", "mqa", "mla"))
        assert not torch.equal(first, rows("mha", 2, step))


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


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_finished_runs_are_published(
    streams: TokenStreams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "RunOptions", each_step_logged)
    work, target = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    tensors = {"stdlib": torch.from_numpy(streams.stdlib)}
    tensors |= {"packages": torch.from_numpy(streams.packages)}
    tensors["held_out"] = torch.arange(513).remainder(61).unsqueeze(0)
    save_file(tensors, work / "tokens.safetensors")
    for name, seed in (("mla", 0), ("mqa", 1), ("mha-plain", 0)):
        variants.train_run(variants.variant_recipe(name, seed), work, compiled=False)
    assert variants.publish(work, target) == 3
    record = json.loads((target / "results.json").read_text())
    runs = {(run["variant"], run["seed"]): run for run in record["runs"]}
    assert runs.keys() == {("mla", 0), ("mqa", 1)}
    assert [run["variant"] for run in record["controls"]] == ["mha-plain"]
    assert (record["steps"], record["tokens_per_run"], record["window"]) == (2, 1024, 256)
    one = runs["mla", 0]
    assert one["kv_bytes_per_token"] == 4 * 128 * 2
    assert [point["step"] for point in one["curve"]] == [1, 2]
    assert set(one["bits_per_byte"]) == set(record["held_out"]) == {"stdlib", "jinja2"}
    assert [path.name for path in target.iterdir() if path.is_dir()] == ["mla"]  # of seed 0 alone


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


def test_without_a_finished_run_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("kept")
    with pytest.raises(ConfigError, match=r"No run in .* has all its steps"):
        variants.publish(tmp_path / "work", tmp_path)
    assert (tmp_path / "results.json").read_text() == "kept"


@pytest.mark.parametrize("workers", ["0", "-1", "two"])
def test_workers_are_counted(workers: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["variants", "--workers", workers])
    assert "no whole number of at least 1" in capsys.readouterr().err


def each_step_logged(folder: Path, **options: bool) -> RunOptions:
    return RunOptions(folder, evaluate_every=1, **options)  # type: ignore[arg-type]


def test_an_unfinished_run_is_not_published(
    streams: TokenStreams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = variants.variant_recipe("mla", 0)
    small = replace(recipe, batch_tokens=256)
    trainer = Trainer(small, streams, RunOptions(tmp_path, compile=False, progress=False))
    assert not variants.finished(recipe, tmp_path)
    trainer.save()
    assert not variants.finished(recipe, tmp_path)
    trainer.step = recipe.steps
    trainer.save()
    assert variants.finished(recipe, tmp_path)


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_the_committed_weights_are_what_transformers_makes_of_them(name: str) -> None:
    model = load_model(open_model(str(COMMITTED / name)), torch.float32)
    assert largest_difference(logits_of(model, IDS), transformers_logits(COMMITTED / name)) < 1e-5


def test_the_committed_results_are_complete() -> None:
    record = json.loads((COMMITTED / "results.json").read_text())
    runs = {(run["variant"], run["seed"]): run for run in record["runs"]}
    assert runs.keys() == {(name, seed) for name in variants.VARIANTS for seed in variants.SEEDS}
    for (name, _), run in runs.items():
        config = variants.VARIANTS[name]
        assert run["parameters"] == parameters(Decoder(config))
        assert run["kv_bytes_per_token"] == 2 * config.num_layers * cache_spec(config).block_values(
            1
        )
        assert run["curve"][-1]["step"] == record["steps"] == variants.STEPS
        assert 0.5 < run["bits_per_byte"]["stdlib"] < run["curve"][0]["held_out"]
    assert [run["variant"] for run in record["controls"]] == list(variants.CONTROLS)


def test_the_control_differs_in_its_norms_alone() -> None:
    [control] = variants.CONTROLS.values()
    assert replace(control, family="qwen3", qk_norm=True) == variants.VARIANTS["mha"]
    assert parameters(Decoder(control)) == parameters(Decoder(variants.VARIANTS["mha"])) - 4 * 64
