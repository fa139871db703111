"""Training of draft heads: it learns, it continues where it stopped."""

import json

import pytest
import torch

from minillm import SamplingParams
from minillm.errors import ConfigError
from minillm.lab.training import heads, own_text
from minillm.lab.training.heads import HeadRecipe, HeadTrainer, Task
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from tests.engine.small import make

RECIPE = HeadRecipe("medusa", num_heads=2, width=16, steps=30, rows_per_step=8, lr=0.05)


@pytest.fixture
def trainer(folder, tmp_path):
    """A new run on its way to `RECIPE.steps`."""

    def build() -> HeadTrainer:
        model = load_model(open_model(folder), torch.float32).requires_grad_(False)
        return HeadTrainer(Task(RECIPE, model), tmp_path)

    return build


ROWS = torch.arange(16)[:, None] + torch.arange(24) % 7  # each repeats seven tokens


def test_the_loss_falls(trainer):
    run = trainer()
    hidden = run.task.hidden(ROWS)
    losses = [run.train_step(ROWS, hidden) for _ in range(RECIPE.steps)]
    assert losses[-1] < losses[0] - 1


def test_heads_begin_as_the_output_matrix(trainer):
    task = trainer().task
    hidden = task.hidden(ROWS).float()
    for offset, (logits, tokens) in enumerate(task.predictions(ROWS, hidden), start=2):
        torch.testing.assert_close(logits, task.target.logits(hidden[:, :-offset]))
        assert torch.equal(tokens, ROWS[:, offset:])


def test_a_run_continues_as_if_it_had_not_stopped(trainer, tmp_path):
    whole, first = trainer(), trainer()
    hidden = whole.task.hidden(ROWS)
    for _ in range(6):
        whole.train_step(ROWS, hidden)
    for _ in range(3):
        first.train_step(ROWS, hidden)
    first.save()
    second = trainer()
    assert second.resume()
    assert second.step == 3
    for _ in range(3):
        second.train_step(ROWS, hidden)
    for name, tensor in whole.tensors.items():
        assert torch.equal(tensor, second.tensors[name])


def test_the_command(folder, tmp_path, cli, monkeypatch):
    """It trains, goes on with a run that was stopped, and makes heads that an engine takes."""
    for module in (own_text, heads):
        monkeypatch.setattr(module, "PROMPT", 8)
    monkeypatch.setattr(own_text, "NEW", 20)
    monkeypatch.setattr(own_text, "PART", 6)
    monkeypatch.setattr(heads, "EVERY", 2)
    out = tmp_path / "heads"
    argv = ("train", "medusa", "--model", folder, "--out", out, "--rows", 9, "--heads", 2)
    step = HeadTrainer.train_step

    def stopped(run: HeadTrainer, *rows: torch.Tensor) -> float:
        if run.step == 3:
            raise ConfigError("stopped")
        return step(run, *rows)

    monkeypatch.setattr(HeadTrainer, "train_step", stopped)
    assert "stopped" in cli(*argv, "--steps", 4).err
    assert not (out / "heads.json").exists()
    monkeypatch.setattr(HeadTrainer, "train_step", step)
    monkeypatch.setattr(own_text, "LLM", None)  # the text is there
    shown = cli(*argv, "--steps", 4)
    assert shown.code == 0, shown.err
    assert "Continuing at step 2" in shown.out
    card = json.loads((out / "heads.json").read_text())
    assert [len(each) for each in card["accuracy"].values()] == [2, 2, 2]
    config = {"method": "medusa", "model": str(out), "num_speculative_tokens": 2}
    llm = make(folder, speculative_config=config)
    llm.generate("abc", SamplingParams(max_tokens=20, ignore_eos=True))
    assert llm.engine.scheduler.counters.num_draft_tokens > 10
    llm.close()
    assert cli(*argv, "--steps", 5).refused("holds a run with other settings, another model")


@pytest.mark.parametrize(("option", "message"), [
    (("--heads", 16), "--heads is 16; it must be from 1 to 15."),
    (("--model", "preset:qwen3-8b"), "has no weights; heads are trained for a model with"),
    (("--text", "missing.txt"), "missing.txt cannot be read"),
    (("--text", "tiny.txt"), "prompts need at least 2,560"),
    (("--out", "tiny.txt/heads"), "cannot be written"),
    (("--out", "."), "is not empty; give a new folder"),
], ids=["heads", "preset", "no text", "short text", "file", "full"])  # fmt: skip
def test_what_the_command_refuses(cli, option, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.txt").write_text("short")
    assert cli("train", "medusa", "--model", "tiny", "--out", "new", *option).refused(message)
