"""Chapter 14's own functions: planted channels, and ways to round inputs."""

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


@pytest.mark.slow
def test_inputs_are_changed_while_judging_only():
    tiny = Subject()
    tiny.windows = [ids[:96] for ids in tiny.windows[:1]]
    tiny._own = tiny._dists()
    exact = tiny.judge(lambda name, weight: weight)
    halved = tiny.judge(lambda name, weight: weight, lambda name, x: 0.5 * x)
    assert halved.kl > 0.01
    doubled = tiny.judge(lambda name, weight: 2 * weight, lambda name, x: 0.5 * x)
    assert doubled.kl < 1e-8  # powers of two change nothing
    assert tiny.judge(lambda name, weight: weight) == exact


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


def test_the_relative_error_is_that_of_the_outputs():
    other = WEIGHT + 0.1
    seen = ch14.statistics({"a": X})
    want = ((other - WEIGHT) @ X.T).square().sum() / (WEIGHT @ X.T).square().sum()
    assert ch14.relative_error({"a": WEIGHT}, {"a": other}, seen) == pytest.approx(
        float(want), rel=1e-4
    )
