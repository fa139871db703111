"""Chapter 16's distributions, beside numpy, and dice."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minillm import SamplingParams
from minillm.speculative.proposer import DraftRow
from minillm_exercises.chapters import ch16

TENTH = Fraction(1, 10)
P, Q = [1 * TENTH, 6 * TENTH, 3 * TENTH], [5 * TENTH, 3 * TENTH, 2 * TENTH]
LEFT = [Fraction(0), Fraction(3, 4), Fraction(1, 4)]


def row(*tokens: int, num_drafts: int = 3) -> DraftRow:
    new = SimpleNamespace(params=SamplingParams(temperature=1.0), seed=5, sample_index=0)
    return DraftRow(new, tokens, num_drafts, 0)


def by_hand(p, q):
    """The formula as it is written, in float64."""
    pairs = [(a, b) for a, b in zip(p, q, strict=True)]
    return sum(1 / sum(max(b / a, d / c) for b, d in pairs) for a, c in pairs if a > 0 and c > 0)


def test_agreement_is_the_formula_and_the_share_of_equal_draws():
    generator = np.random.default_rng(0)
    p, q = generator.dirichlet(np.ones(7), size=5), generator.dirichlet(np.ones(7), size=5)
    p[0, :2], q[0, 1:3] = 0.0, 0.0
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    found = ch16.agreement(torch.tensor(p), torch.tensor(q))
    assert found.tolist() == pytest.approx([by_hand(*pair) for pair in zip(p, q, strict=True)])
    with np.errstate(divide="ignore"):
        noise = generator.gumbel(size=(100_000, 7))
        same = (np.log(p[1]) + noise).argmax(1) == (np.log(q[1]) + noise).argmax(1)
    assert same.mean() == pytest.approx(found[1].item(), abs=0.01)


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_the_dist_of_a_batch_that_stops_together(batch):
    """Drawn row by row as the listing does it."""
    rng = np.random.default_rng(0)
    p, q, left = (np.array([float(x) for x in dist]) for dist in (P, Q, LEFT))
    drafts = rng.choice(3, p=q, size=(200_000, batch))
    accepted = rng.random(drafts.shape) < (p / q)[drafts]
    first = np.where(accepted.all(1), drafts[:, 0], rng.choice(3, p=left, size=len(drafts)))
    found = np.bincount(first, minlength=3) / len(first)
    assert found == pytest.approx([float(x) for x in ch16.batch_dist(P, Q, LEFT, batch)], abs=0.005)


def test_the_draft_noise_in_the_residual_is_wrong_by_what_an_integral_says():
    """P(draft a, residual c) by integration over the ratio of two exponential waiting times."""
    p, q, left = ([float(x) for x in dist] for dist in (P, Q, LEFT))
    found = ch16.shared_noise_dist(P, Q, LEFT)
    c = 0.0  # only token 0 can be rejected; then b or c wins the race of the residual
    ratios = np.linspace(q[2] / q[0], 60, 400_000)  # E_c / E_a
    others = np.maximum(q[1] / q[0], left[1] * ratios / left[2])
    c = np.trapezoid(1 / (1 + ratios + others) ** 2, ratios) * (1 - p[0] / q[0])
    assert found[0] == pytest.approx(0.1, abs=0.003)
    assert found[2] == pytest.approx(q[2] + c, abs=0.003)


def test_dice_roll_any_token():
    dice = ch16.Dice(4)
    rolled = [token for _ in range(50) for token in dice.propose([row(1)])[0]]
    assert len(rolled) == 150
    assert set(rolled) == {0, 1, 2, 3}
