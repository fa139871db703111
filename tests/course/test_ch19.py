"""Chapter 19's noise and distributions, beside the engine's sampler and by drawing."""

from fractions import Fraction

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.sampling.sampler import sample
from minillm_exercises.chapters import ch19

P = [Fraction(each, 100) for each in (30, 5, 15, 2, 20, 10, 8, 10)]


def test_the_noise_is_the_engine_s():
    """Logits plus this noise give the tokens that the engine draws at these positions."""
    logits = 4 * torch.rand(20, 128, generator=torch.Generator().manual_seed(1))
    want = (logits + ch19.noise(20, 128)).argmax(dim=-1)
    assert want.tolist() == sample(logits, SamplingParams(temperature=1.0), 0, range(20))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_dist_of_local_noise(size):
    """By drawing: tokens at the same place share their noise."""
    generator = torch.Generator().manual_seed(0)
    rows, each = 200_000, len(P) // size
    gumbel = -(-torch.rand(rows, each, generator=generator).log()).log()
    scores = torch.tensor([float(p) for p in P]).log() + gumbel.repeat(1, size)
    found = scores.argmax(1).bincount(minlength=len(P)) / rows
    dist = ch19.dist_of_local_noise(P, size)
    assert sum(dist) == 1
    assert found.tolist() == pytest.approx([float(p) for p in dist], abs=0.006)
    assert (dist == P) == (size == 1)
    assert ch19.distance(dist, P) == sum(max(a - b, 0) for a, b in zip(dist, P, strict=True))


@pytest.fixture(scope="module")
def two() -> LLM:
    return ch19.open_ranks("tiny", 2)


def test_the_table_of_what_a_rank_holds(two):
    rows = {name.strip("`"): rest for name, *rest in ch19.held(two, 1)}
    assert rows["gate_proj"] == ["768 × 256", "384 to 767", "all"]
    assert rows["down_proj"] == ["256 × 768", "all", "384 to 767"]
    assert rows["embed_tokens"][1] == "2048 to 4095"
    assert len(rows) == 8
