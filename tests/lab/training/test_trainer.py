"""The trainer on a toy text: it learns, it resumes with the same bits, it distils."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from minillm.config import ModelConfig
from minillm.errors import CheckpointError, ConfigError
from minillm.lab.training.corpus import load_manifest
from minillm.lab.training.data import TOKENIZER, TokenStreams, row
from minillm.lab.training.export import export
from minillm.lab.training.launch import fingerprint, train
from minillm.lab.training.recipes import RECIPES, Phase, Recipe
from minillm.lab.training.trainer import (
    RunOptions,
    Trainer,
    build_model,
    distillation_loss,
    logits_of,
    row_logits,
    text_loss,
)
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model

CONFIG = ModelConfig(
    family="qwen3", vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=16, intermediate_size=48, max_position_embeddings=64, tie_word_embeddings=True,
    qk_norm=True,
)  # fmt: skip
TOY = Recipe(
    "toy", CONFIG,
    phases=(Phase(12, 8, windows=(32,)), Phase(28, 4, windows=(16, 16, 32))), decay_steps=20,
    batch_tokens=512, micro_tokens=256, matrix_lr=0.02, embedding_lr=0.03, warmup_steps=4,
)  # fmt: skip


@pytest.fixture
def streams() -> TokenStreams:
    """Two texts with different rules: count up by 1, and count up by 3."""
    numbers = np.arange(9_000)
    return TokenStreams((numbers % 61).astype(np.uint16), (numbers * 3 % 61).astype(np.uint16))


def trainer(recipe: Recipe, streams: TokenStreams, folder: Path) -> Trainer:
    options = RunOptions(folder, compile=False, save_every=20, evaluate_every=10, progress=False)
    return Trainer(recipe, streams, options)


@pytest.mark.slow
def test_it_learns(streams: TokenStreams, tmp_path: Path) -> None:
    run = trainer(TOY, streams, tmp_path)
    rows = run.step_rows(0)[:4]
    before = run.evaluate(rows)
    run.run(rows)
    assert before > 3.5  # ln 64 = 4.16
    assert run.evaluate(rows) < 0.8
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [10, 20, 30, 40]
    assert log[-1]["held_out"] == pytest.approx(run.evaluate(rows))


def test_resuming_continues_with_the_same_bits(streams: TokenStreams, tmp_path: Path) -> None:
    whole = trainer(TOY, streams, tmp_path / "whole")
    whole.run(until=9)
    first = trainer(TOY, streams, tmp_path / "parts")
    assert not first.resume()
    first.run(until=5)
    second = trainer(TOY, streams, tmp_path / "parts")
    assert second.resume()
    assert second.step == 5
    second.run(until=9)
    for name, tensor in whole.model.checkpoint_tensors().items():
        assert torch.equal(tensor.target, second.model.checkpoint_tensors()[name].target), name


def test_a_checkpoint_of_another_recipe_is_refused(streams: TokenStreams, tmp_path: Path) -> None:
    trainer(TOY, streams, tmp_path).save()
    with pytest.raises(CheckpointError, match=r"belongs to the recipe 'toy'.*--out"):
        trainer(replace(TOY, name="other"), streams, tmp_path).resume()


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    factors = [TOY.lr_factor(step) for step in range(TOY.steps)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[19:22] == [1.0, 1.0, 0.95]
    assert factors[-1] == pytest.approx(0.05)
    assert [TOY.window_at(step) for step in (11, 12, 13, 14, 15)] == [32, 16, 16, 32, 16]


def test_distillation_is_cross_entropy_with_the_teacher() -> None:
    ids = torch.arange(64) % 61
    student, teacher = (build_model(CONFIG, seed) for seed in (1, 2))
    loss = distillation_loss(student, ids, teacher, 32)
    p = row_logits(teacher, ids, 32).float().softmax(-1)
    q = row_logits(student, ids, 32).float().log_softmax(-1)
    entropy = torch.distributions.Categorical(probs=p).entropy().mean()
    wanted = nn.KLDivLoss(reduction="batchmean")(q, p) + entropy
    torch.testing.assert_close(loss, wanted)
    with torch.no_grad():  # nothing beats the teacher at being the teacher
        assert distillation_loss(teacher, ids, teacher, 32) < loss
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_autocast_loss_is_near_the_float32_loss() -> None:
    model, ids = build_model(CONFIG, 0), (torch.arange(33) * 7) % 61
    exact = nn.functional.cross_entropy(logits_of(model, ids[:-1].tolist()), ids[1:])
    assert text_loss(model, ids[:-1], ids[1:], 32).item() == pytest.approx(exact.item(), rel=0.01)


def test_transformers_reads_what_is_exported(tmp_path: Path) -> None:
    model, ids = build_model(CONFIG, 0), [7 * number % 64 for number in range(60)]
    model.initialize(std=0.15, seed=1)
    export(model, tmp_path)
    again = load_model(open_model(str(tmp_path)), torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        wanted = reference(torch.tensor([ids])).logits[0]
    assert wanted.std() > 0.2
    torch.testing.assert_close(logits_of(again, ids), wanted, rtol=1e-4, atol=1e-5)


def test_workers_must_share_equally(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"3 workers cannot divide the rows .*1, 2 or 4"):
        train(RECIPES["tiny"], RunOptions(tmp_path), workers=3)


def test_rows_visit_each_window_once_per_epoch_and_depend_on_nothing_else() -> None:
    stream, window = np.arange(10_000, dtype=np.uint16), 64
    count = (len(stream) - 1) // window - 1
    epochs = [[row(stream, e * count + i, window, seed=3) for i in range(count)] for e in (0, 1)]
    starts, again = ([int(each[0]) for each in epoch] for epoch in epochs)
    assert len(set(starts)) == count
    assert {b - a for a, b in zip(sorted(starts), sorted(starts)[1:], strict=False)} == {window}
    assert starts != sorted(starts)
    assert again != starts
    assert again[0] % window != starts[0] % window  # cut at other places
    for number, one in enumerate(epochs[0]):
        assert one.dtype == np.int64
        assert np.array_equal(one, np.arange(one[0], one[0] + window + 1))
        assert np.array_equal(one, row(stream, number, window, seed=3))
    assert not np.array_equal(epochs[0][5], row(stream, 5, window, seed=2))


@pytest.mark.slow
def test_two_processes_learn_what_one_does(streams: TokenStreams, tmp_path: Path) -> None:
    one = trainer(TOY, streams, tmp_path / "one")
    losses = [one.train_step() for _ in range(3)]
    short = replace(TOY, phases=(Phase(3, 8, (32,)),), decay_steps=1)
    made_from = {"corpus": fingerprint(load_manifest(), Tokenizer.from_file(str(TOKENIZER)))}
    tensors = {"stdlib": torch.from_numpy(streams.stdlib)}
    tensors |= {"packages": torch.from_numpy(streams.packages), "held_out": one.step_rows(0)}
    (tmp_path / "two").mkdir()
    save_file(tensors, tmp_path / "two" / "tokens.safetensors", made_from)
    options = RunOptions(tmp_path / "two", compile=False, evaluate_every=1, progress=False)
    train(short, options, workers=2)
    two = trainer(short, streams, tmp_path / "two")
    assert two.resume()
    log = [json.loads(line) for line in (tmp_path / "two" / "log.jsonl").read_text().splitlines()]
    assert [record["loss"] for record in log] == pytest.approx(losses, rel=1e-3)
    for name, tensor in one.model.checkpoint_tensors().items():
        other = two.model.checkpoint_tensors()[name].target
        torch.testing.assert_close(tensor.target, other, atol=2e-3, rtol=0)
