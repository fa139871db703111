"""Training of draft heads: it learns, it continues where it stopped."""

import pytest
import torch

from minillm.errors import CheckpointError
from minillm.lab.training.heads import HeadRecipe, HeadTrainer, Task
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model

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
    other = HeadTrainer(
        Task(HeadRecipe("medusa", num_heads=2, width=16), first.task.target), tmp_path
    )
    with pytest.raises(CheckpointError, match="is of a run with other settings"):
        other.resume()
