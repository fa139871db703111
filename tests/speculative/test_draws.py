"""What a draft model draws, against the sampler, and against distributions by numpy in float64."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from minillm.api.sampling_params import SamplingParams
from minillm.ops.philox import Purpose
from minillm.scheduling.plan import NewSequence
from minillm.speculative.draws import Draws
from minillm.speculative.proposer import Draft, DraftRow
from minillm_kernels import reference
from tests.sampling.sampling_rows import SamplingRow, sample
from tests.speculative.distributions import pipeline

V = 11
HOW = {
    "greedy": {"temperature": 0},
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "min-p": {"temperature": 1.3, "min_p": 0.2},
    "top-k": {"temperature": 0.9, "top_k": 4},
    "top-p": {"temperature": 1.1, "top_p": 0.7},
    "all": {"temperature": 1.5, "top_k": 6, "top_p": 0.85, "min_p": 0.02},
}


def rows_of(count: int, num_drafts: int = 1, known: int = 5, **how: float) -> list[DraftRow]:
    """Rows that differ by their seed."""
    params = SamplingParams(**how)
    news = [NewSequence(i, 0, known, (1,) * known, params, seed=i - 7) for i in range(count)]
    return [DraftRow(new, new.token_ids, num_drafts, 0) for new in news]


def draw(rows: list[DraftRow], logits: list[Tensor], coupled: bool) -> list[Draft]:
    draws = Draws(rows, torch.device("cpu"), coupled)
    for each in logits:
        draws.draw(each)
    return draws.drafts()


def logits_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, V, generator=torch.Generator().manual_seed(seed)) * 2


def dist_of(logits: Tensor, **how: float) -> NDArray[np.float64]:
    """Probabilities of one row, by numpy."""
    return pipeline(logits.numpy(), SamplingParams(**how))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_coupled_draft_is_what_the_sampler_draws_from_these_logits(how, dtype):
    logits = [logits_of(50, seed).to(dtype) for seed in range(3)]
    rows = rows_of(50, 3, **HOW[how])
    found = draw(rows, logits, coupled=True)
    for depth, each in enumerate(logits):
        of_sampler = [
            SamplingRow(row.new.params, row.new.seed, 0, len(row.token_ids) + depth) for row in rows
        ]
        expected = sample(each, of_sampler).token_ids
        assert [draft.token_ids[depth] for draft in found] == expected
    assert all(draft.dist is None for draft in found)


@pytest.mark.parametrize("how", HOW)
def test_drafts_follow_their_dist(how):
    """Counts of 20,000 draws: an expected distance of 0.009 for 11 tokens, and 0.02 with a
    probability of 10^-4; the noise is fixed."""
    count = 20_000
    logits = logits_of(1).expand(count, V)
    found = draw(rows_of(count, **HOW[how]), [logits], coupled=False)
    tokens = [draft.token_ids[0] for draft in found]
    shares = np.bincount(tokens, minlength=V) / count
    dist = dist_of(logits[0], **HOW[how])
    assert np.abs(shares - dist).sum() / 2 < 0.02
    assert set(tokens) <= set(np.flatnonzero(dist))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_drafts_have_noise_of_their_own_where_they_are_not_coupled(dtype):
    """That of `Purpose.DRAFT`, as the reference draws it; float16 has no function in C."""
    count, ones = 500, torch.ones(500)
    rows, logits = rows_of(count, temperature=1.0), logits_of(count).to(dtype)
    own, coupled = (
        [draft.token_ids[0] for draft in draw(rows, [logits], each)] for each in (False, True)
    )
    seeds = torch.tensor([row.new.seed for row in rows])
    stream = seeds, torch.zeros_like(seeds), torch.full_like(seeds, 5)
    for tokens, purpose in ((own, Purpose.DRAFT), (coupled, Purpose.SAMPLE)):
        drawn = reference.gumbel_argmax(logits, ones, 0 * ones, *stream, purpose)
        assert tokens == drawn.tolist()
    assert own != coupled


def test_rows_leave_when_they_have_their_drafts():
    rows = [*rows_of(2, 3, temperature=1.0), *rows_of(1, 1, temperature=0.0)]
    logits = [logits_of(3, 0), logits_of(2, 1), logits_of(2, 2)]
    for coupled in (True, False):
        found = draw(rows, logits, coupled)
        assert [len(draft.token_ids) for draft in found] == [3, 3, 1]
        assert found[2].token_ids == [int(logits[0][2].argmax())]
        dists = [draft.dist for draft in found]
        if not coupled:
            assert [dist.shape for dist in dists] == [(3, V), (3, V), (1, V)]
            expected = dist_of(logits[1][1], temperature=1.0)
            np.testing.assert_allclose(dists[1][1].numpy(), expected, atol=1e-6)
