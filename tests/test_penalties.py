"""A history that is carried from step to step against one that is counted anew."""

import numpy as np
import pytest
import torch

from minillm import penalties
from minillm.penalties import History, penalise
from minillm.sampler import SamplingRow, sample
from minillm.sampling_params import SamplingParams

PARAMS = dict(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.2)


def row(prompt: list[int], output: list[int], **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), 0, 0, 0, prompt, output)


def penalised(*rows: SamplingRow) -> torch.Tensor:
    logits = torch.randn(len(rows), 500, generator=torch.Generator().manual_seed(0))
    penalise(logits, rows)
    return logits


def test_each_token_is_penalised_by_what_it_did():
    """By hand: repetition for the prompt, too, frequency by count, presence once."""
    prompt, output = [1, 2, 2], [3, 2, 3, 3]
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    for token in {*prompt, *output}:
        value, count = logits[0, token].item(), output.count(token)
        value = value / 1.3 if value > 0 else value * 1.3
        expected[0, token] = value - 0.4 * count - (-0.2 if count else 0)
    torch.testing.assert_close(penalised(row(prompt, output, **PARAMS)), expected)


@pytest.mark.parametrize("params", [PARAMS, {"repetition_penalty": 1.3}, {"presence_penalty": 0.5}])
def test_a_carried_history_is_a_new_one(params):
    order = np.random.default_rng(0).integers(0, 300, (3, 400)).tolist()
    outputs: list[list[int]] = [[], [], []]
    rows = [row([1, 2, 2, 9 * i], outputs[i], **params) for i in range(3)]
    for step in range(400):
        for output, tokens in zip(outputs, order, strict=True):
            output.append(tokens[step])
        if step % 37 == 0:
            again = [row([1, 2, 2, 9 * i], list(outputs[i]), **params) for i in range(3)]
            assert torch.equal(penalised(*rows), penalised(*again))
    assert rows[0].history is not None  # it was carried


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.output_token_ids.pop(),
        lambda row: row.output_token_ids.__setitem__(-1, 8),
        lambda row: setattr(row, "output_token_ids", [7, 7, 7, 7]),
        lambda row: setattr(row, "output_token_ids", [7, 7, 5, 7]),  # where reading ended, the same
    ],
)
def test_another_output_has_another_history(change):
    changed = row([1], [3, 4, 5], **PARAMS)
    penalised(changed)
    change(changed)
    assert torch.equal(penalised(changed), penalised(row([1], changed.output_token_ids, **PARAMS)))


def test_what_was_counted_is_not_counted_again(monkeypatch):
    counted = []

    class Watched(list):
        def __getitem__(self, key):
            found = super().__getitem__(key)
            if isinstance(key, slice):
                counted.append(len(found))
            return found

    output = Watched([5] * 100)
    watched = row([1], output, **PARAMS)
    for _ in range(3):
        sample(torch.zeros(1, 500), [watched])
        output.append(6)
    assert counted == [100, 1, 1]


def test_a_history_has_room_for_any_number_of_tokens(monkeypatch):
    monkeypatch.setattr(penalties, "ROOM", 1)
    output: list[int] = []
    history = History((), output)
    for token in range(100):
        output.append(token)
        ids, counts = history.read()
        assert ids.tolist() == output
        assert counts.tolist() == [1] * len(output)


def test_rows_without_penalties_are_left_alone():
    logits = torch.randn(3, 20)
    before = logits.clone()
    rows = [row([1], [2]), row([1], [2], **PARAMS), row([1], [2])]
    penalise(logits, rows)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert (logits[1] != before[1]).nonzero().flatten().tolist() == [1, 2]
    penalise(logits, rows[:1])
