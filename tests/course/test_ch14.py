"""Chapter 14's own functions: planted channels, rounded inputs, errors of outputs, pictures."""

import pytest
import torch

from minillm_exercises.chapters import ch14
from minillm_exercises.chapters.quality import Subject

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 16, generator=GENERATOR)
WEIGHT = torch.randn(8, 16, generator=GENERATOR)


@pytest.mark.slow
def test_a_planted_model_computes_what_it_did():
    """Logits are equal, the inputs of two channels are not, and judging it finds no distance."""
    plain, planted = Subject(), Subject()
    where = planted.plant(50.0, channels=2)
    for ours, theirs in zip(plain._dists(), planted._dists(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
    before, after = (each.inputs(64)["2.qkv_proj"] for each in (plain, planted))
    at = where["2.qkv_proj"]
    assert torch.allclose(after[:, at], 50 * before[:, at], rtol=1e-3, atol=1e-3)
    others = [i for i in range(256) if i not in at.tolist()]
    assert torch.allclose(after[:, others], before[:, others], rtol=1e-3, atol=1e-3)
    assert planted.judge(lambda name, weight: weight).kl == 0
    assert len(where) == 14


def test_inputs_are_changed_while_judging_only():
    tiny = Subject()
    exact = tiny.judge(lambda name, weight: weight)
    halved = tiny.judge(lambda name, weight: weight, lambda name, x: 0.5 * x)
    assert halved.kl > 0.01
    doubled = tiny.judge(lambda name, weight: 2 * weight, lambda name, x: 0.5 * x)
    assert doubled.kl < 1e-8  # powers of two change nothing
    assert tiny.judge(lambda name, weight: weight) == exact


def test_statistics_are_those_of_the_first_tokens():
    found = ch14.statistics({"a": X}, 10)["a"]
    assert found.count == 10
    assert torch.allclose(found.mean, X[:10].abs().mean(0))
    assert torch.allclose(found.hessian, 2 / 10 * X[:10].T @ X[:10], rtol=1e-5)


def test_the_relative_error_is_that_of_the_outputs():
    other = WEIGHT + 0.1
    seen = ch14.statistics({"a": X})
    want = ((other - WEIGHT) @ X.T).square().sum() / (WEIGHT @ X.T).square().sum()
    assert ch14.relative_error({"a": WEIGHT}, {"a": other}, seen) == pytest.approx(
        float(want), rel=1e-4
    )


def test_int8_inputs_have_a_step_for_a_tensor_or_a_token():
    x = torch.tensor([[127.0, 0.4], [1.27, 0.004]])
    ones = torch.ones(2)
    assert ch14.int8_inputs(x, ones, None).tolist() == [[127.0, 0.0], [1.0, 0.0]]
    by_token = ch14.int8_inputs(x, ones, -1)
    assert by_token[1].tolist() == pytest.approx([1.27, 0.0])
    scaled = ch14.int8_inputs(x, torch.tensor([127.0, 0.4]), None)
    assert scaled[0].tolist() == pytest.approx([127.0, 0.4])


def test_ways_to_round_inputs():
    """One outlier: a step for the token loses the others, and each remedy keeps them."""
    x = torch.randn(8, 64, generator=GENERATOR)
    x[:, 5] = 90.0
    others = torch.arange(64) != 5

    def error(rounded):
        return float((rounded - x)[:, others].norm() / x[:, others].norm())

    plain = error(ch14.by_token(x))
    assert plain > 0.15
    assert error(ch14.outliers_apart(x)) < 0.02
    assert torch.equal(ch14.outliers_apart(x)[:, 5], x[:, 5])
    assert error(ch14.rotated(x)) < plain / 2
    groups = ch14.int8_inputs(x, torch.ones(64), 32)
    assert error(groups) < 0.8 * plain  # 31 inputs share the outlier's group
    assert (groups - x)[:, 32:].norm() < 0.01 * x[:, 32:].norm()
    assert torch.allclose(ch14.rotation(64) @ ch14.rotation(64).T, torch.eye(64), atol=1e-5)


def test_correlation_and_large_channels():
    assert torch.allclose(ch14.correlation(X).diagonal(), torch.ones(16))
    same = torch.stack((X[:, 0], -2 * X[:, 0]), 1)
    assert ch14.correlation(same)[0, 1].item() == pytest.approx(-1)
    assert ch14.large_channels(torch.tensor([[1.0, -3.0], [-1.0, 3.0]])) == 1.5
