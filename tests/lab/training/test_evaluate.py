"""The measurements, against definitions written out the slow way."""

import hashlib
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.lab.training import evaluate
from minillm.lab.training.trainer import build_model
from tests.lab.training.test_trainer import CONFIG


def choice(who: str, ids: Sequence[int]) -> int:
    """The greedy choice of a pretend model: a hash of what it reads, biased to agree."""
    digest = hashlib.sha256(bytes(ids[-3:])).digest()
    return digest[0] % 4 if who == "target" or digest[1] % 4 else 5


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 200))
@settings(max_examples=50)
def test_count_accepted_is_what_speculation_does(length: int, k: int, start: int) -> None:
    text, accepted, drafted = [start], 0, 0
    target = [start]
    for _ in range(length):
        target.append(choice("target", target))
    while len(text) < len(target):
        room = min(k, len(target) - len(text))
        guess = list(text)
        for _ in range(room):
            guess.append(choice("draft", guess))
        drafted += room
        for token in guess[len(text) :]:
            wanted = choice("target", text)
            text.append(wanted)
            if token != wanted:
                break
            accepted += 1
        else:
            text.append(choice("target", text))  # the bonus token
    agreed = [
        choice("draft", target[:i]) == target[i] for i in range(1, len(target))
    ]  # teacher-forced
    assert evaluate.count_accepted(agreed, k) == (accepted, drafted)


@pytest.mark.parametrize("context", [4, 7, 10, 64])
def test_windows_predict_every_token_once_with_enough_context(context: int) -> None:
    model = build_model(CONFIG, 0)
    with torch.no_grad():
        model.embedding.weight.mul_(20)  # sharp predictions, so that context matters
    ids = [(i * i + i // 3) % 61 for i in range(25)]
    total, stride = 0.0, context // 2
    for position in range(1, len(ids)):
        start = max(0, math.ceil((position - context) / stride)) * stride
        logits = evaluate.logits_of(model, ids[start:position])[-1]
        total -= float(logits.log_softmax(-1)[ids[position]])
    assert evaluate.text_nats(model, ids, context) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(
    ("source", "kept", "good"),
    [
        ("def f():\n    x = 1\n    try:\n        y\n    ex", "def f():\n    x = 1\n", True),
        ("def f(:\n    x\n    y", "def f(:\n    x\n", False),
        ("def f():\n    '''doc\n    x\n    y", "\n", False),
        ("x = 1\nif x:\n    f(a,\n      b", "x = 1\n", True),
        ("x = )\ny = 1\nz", "x = )\ny = 1\n", False),
        ("class A:\n    def f(self):\n        return 1\n    de", None, True),
        ("if x:\n    pass\n  y\nz", "if x:\n    pass\n  y\n", False),
    ],
)
def test_cutting_keeps_errors(source: str, kept: str | None, good: bool) -> None:
    cut = evaluate.complete_statements(source)
    assert kept is None or cut == kept
    assert source.startswith(cut.rstrip("\n"))
    assert evaluate.parses(cut) == good
