"""Training of draft heads: it learns, it continues where it stopped."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from minillm import SamplingParams
from minillm.errors import ConfigError
from minillm.lab.training import eagle, heads, own_text
from minillm.lab.training.eagle import EagleTask
from minillm.lab.training.heads import HeadRecipe, HeadTrainer, Task
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from minillm.speculative.heads import load_heads
from minillm_kernels.philox import Purpose, random_words_of_vocabulary, to_gumbel
from tests.engine.small import make
from tests.speculative.eagled import Formula, write_eagle

RECIPE = HeadRecipe("medusa", num_heads=2, width=16, steps=30, rows_per_step=8, lr=0.05)
LAYER = replace(RECIPE, method="eagle")
TASKS = {
    "medusa": (RECIPE, Task),
    "eagle": (LAYER, EagleTask),
    "parallel": (replace(LAYER, parallel=True), EagleTask),
}


@pytest.fixture(params=TASKS)
def trainer(folder, tmp_path, request):
    """A new run on its way to `RECIPE.steps`."""
    recipe, kind = TASKS[request.param]

    def build() -> HeadTrainer:
        model = load_model(open_model(folder), torch.float32).requires_grad_(False)
        return HeadTrainer(kind(recipe, model), tmp_path)

    return build


ROWS = torch.arange(16)[:, None] + torch.arange(24) % 7  # each repeats seven tokens


def test_the_loss_falls(trainer):
    run = trainer()
    hidden = run.task.hidden(ROWS)
    losses = [run.train_step(ROWS, hidden) for _ in range(RECIPE.steps)]
    least = 0.0
    if isinstance(run.task, EagleTask):  # its loss cannot be below the target's own entropy
        target, last = run.task.target, hidden[..., -hidden.shape[-1] // 2 :].float()
        logits = target.logits(target.norm(last).flatten(0, 1))
        least = float(torch.distributions.Categorical(logits=logits).entropy().mean())
    assert least < losses[-1] < losses[0] - (losses[0] - least) / 3


@pytest.mark.parametrize("trainer", ["medusa"], indirect=True)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_the_command(folder, tmp_path, cli, monkeypatch, name):
    """It trains, goes on with a run that was stopped, and makes heads that an engine takes."""
    method = TASKS[name][0].method
    for module in (own_text, heads, eagle):
        monkeypatch.setattr(module, "PROMPT", 8)
    monkeypatch.setattr(own_text, "NEW", 20)
    monkeypatch.setattr(own_text, "PART", 6)
    monkeypatch.setattr(heads, "EVERY", 2)
    out = tmp_path / "heads"
    argv = ("train", method, "--model", folder, "--out", out, "--rows", 9)
    argv += {"medusa": ("--heads", 2), "eagle": (), "parallel": ("--parallel",)}[name]
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
    count = {"medusa": 2, "eagle": eagle.MEASURED}[method]
    assert [len(each) for each in card["accuracy"].values()] == [count] * 3
    ranks = np.array(list(card["rank_accuracy"].values()))
    assert ranks.shape == (3, count, 10)
    assert ((ranks >= 0) & (ranks.sum(axis=2, keepdims=True) < 1.01)).all()
    config = {"method": method, "model": str(out), "num_speculative_tokens": 2}
    llm = make(folder, speculative_config=config)
    llm.generate("abc", SamplingParams(max_tokens=20, ignore_eos=True))
    assert llm.engine.scheduler.counters.num_draft_tokens > 10
    llm.close()
    assert cli(*argv, "--steps", 5).refused("holds a run with other settings, another model")


@pytest.mark.parametrize(("option", "message"), [
    (("--heads", 16), "--heads is 16; it must be from 1 to 15."),
    (("--minutes", 0), "--minutes is 0; it must be from 1 to"),
    (("--model", "preset:qwen3-8b"), "has no weights; heads are trained for a model with"),
    (("--text", "missing.txt"), "missing.txt cannot be read"),
    (("--text", "tiny.txt"), "prompts need at least 2,560"),
    (("--out", "tiny.txt/heads"), "cannot be written"),
    (("--out", "."), "is not empty; give a new folder"),
    (("--parallel",), "--parallel belongs to eagle; leave it out with medusa."),
], ids=["heads", "minutes", "preset", "no text", "short", "file", "full", "eagle"])  # fmt: skip
def test_what_the_command_refuses(cli, option, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.txt").write_text("short")
    assert cli("train", "medusa", "--model", "tiny", "--out", "new", *option).refused(message)


def test_an_option_of_heads_is_refused_for_a_layer(cli):
    argv = ("train", "eagle", "--model", "tiny", "--out", "new", "--width", 8)
    assert cli(*argv).refused("--width belongs to medusa; leave it out with eagle.")


@pytest.mark.parametrize("trainer", ["eagle", "medusa"], indirect=True)
def test_ranks_are_those_of_the_noise_that_the_target_had(trainer, monkeypatch):
    """Half of the text is the best token with the noise of its seed and position, half the second
    best."""
    task, rows = trainer().task, ROWS[:6].repeat(1, 3)
    logits = torch.randn(6, rows.shape[1], 300, generator=torch.Generator().manual_seed(0))
    first = -(-RECIPE.num_rows // own_text.PART) * own_text.PART
    for row in range(6):
        for place in range(own_text.PROMPT, rows.shape[1]):
            key = (torch.tensor([each]) for each in (first + row, 0, place))
            scores, temperature = logits[row, place - 1], own_text.TEMPERATURES[row % 3]
            if temperature:
                words = random_words_of_vocabulary(*key, Purpose.SAMPLE, 300)
                scores = scores / temperature + to_gumbel(words)[0]
            rows[row, place] = int(scores.argsort(descending=True)[row // 3])
    if isinstance(task, EagleTask):
        monkeypatch.setattr(task, "drafts", lambda _, hidden, count: [hidden] * count)
    else:
        pairs = lambda rows, x: [(x[:, i - 1 : -1], rows[:, i:]) for i in (2, 3, 4, 5)]  # noqa: E731
        monkeypatch.setattr(task, "predictions", pairs)
    assert [*task.rank_accuracy(rows, logits).values()] == [[[0.5, 0.5, *[0.0] * 8]] * 4] * 3
    assert task.accuracy(rows, logits)["0"] == [0.5] * 4


@pytest.mark.parametrize("trainer", ["eagle", "parallel"], indirect=True)
def test_passes_are_what_the_engine_computes(trainer, tmp_path, folder, monkeypatch):
    """Pass i at position p is draft i + 1 after the tokens up to p - i, if the tokens between are
    those drafts: the formula, which has no passes, has the same logits."""
    monkeypatch.setattr("minillm.lab.training.heads.cpu_has_bf16", lambda: False)
    task = trainer().task
    layer = write_eagle(folder, tmp_path / "layer", parallel=task.recipe.parallel)
    load_heads(task.heads, layer, packs=False)
    rows, formula = ROWS[:2], Formula(folder, layer)
    states = torch.stack([torch.tensor(formula.states(ids)) for ids in rows.tolist()])
    torch.testing.assert_close(task.hidden(rows).double(), states, rtol=0.01, atol=0.01)
    found = list(task.drafts(rows, states.float(), 4))
    for row, ids in enumerate(rows.tolist()):
        for last in (3, 10, 19):  # the last known token
            logits = formula.logits(ids[: last + 1], ids[last + 1 : last + 5])
            for i, each in enumerate(logits):
                expected = torch.tensor(each).float()
                torch.testing.assert_close(found[i][row, last + i], expected, rtol=1e-3, atol=1e-3)


def test_a_run_ends_when_its_minutes_are_over():
    recipe = replace(RECIPE, minutes=2, warmup=1)
    assert [recipe.done(3, cpu) for cpu in (0, 60, 120)] == [0.1, 0.5, 1.0]
    assert recipe.lr_at(3, 0.1) == recipe.lr
    assert recipe.lr_at(3, 0.7) == pytest.approx(recipe.lr / 2)
    assert recipe.lr_at(3, 1.2) == 0
