"""The pieces of chapter 02: a test of counts against a distribution, and candidates."""

import math

import pytest
import torch

from minillm import LLM
from minillm.models.forward_pass import Chunk
from minillm_exercises.chapters.ch02 import candidates, chi_square, logprobs, repeated_share
from minillm_exercises.errors import ExerciseError

LOGITS = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()


def test_chi_square_is_pearsons():
    """(60 - 50)^2 / 50 + (40 - 50)^2 / 50 = 4, one degree of freedom."""
    found = chi_square([60, 40], [0.5, 0.5])
    assert found.statistic == pytest.approx(4.0)
    assert found.degrees == 1
    assert found.fits


def test_chi_square_keeps_what_is_left_over():
    """Twelve draws of nine equal outcomes: four make a cell of 16 / 3, four another, and the last
    one joins it. Which four does not depend on their counts."""
    found = chi_square([2, 1, 1, 1, 2, 1, 1, 1, 2], [1 / 9] * 9)
    assert found.degrees == 1
    wanted = (5 - 16 / 3) ** 2 / (16 / 3) + (7 - 20 / 3) ** 2 / (20 / 3)
    assert found.statistic == pytest.approx(wanted)
    assert chi_square([1, 1], [0.5, 0.5]).statistic == pytest.approx(0.0)


def test_chi_square_refuses_an_impossible_outcome():
    """What has probability 0 does not occur once."""
    assert chi_square([99, 1], [1.0, 0.0]).statistic == math.inf
    assert not chi_square([99, 1], [1.0, 0.0]).fits
    assert chi_square([99, 0], [1.0, 0.0]).fits


def test_candidates_are_the_engines():
    """Shares before top-p, best first; what is kept is what the engine's top-p keeps."""
    found = candidates(LOGITS.flip(0), 1.0, 0.7)
    assert found.best == 3
    assert found.shares == pytest.approx((0.5, 0.25, 0.125, 0.125))
    assert found.num_kept == 2
    many = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 3
    scaled = (many - many.max()) / 2.0
    mass = scaled.double().softmax(0).sort(descending=True).values.cumsum(0)
    wanted = int((mass < 0.8).sum()) + 1
    assert candidates(many, 2.0, 0.8).num_kept == wanted
    with pytest.raises(ExerciseError, match="temperature=0"):
        candidates(LOGITS, 0, 0.9)


def test_repeated_share():
    """Five pairs, (1, 2) twice and (2, 1) twice: two of five occurred before."""
    assert repeated_share([1, 2, 1, 2, 1, 3], 2) == pytest.approx(0.4)
    assert repeated_share([1, 2, 3, 4]) == 0
    with pytest.raises(ExerciseError, match="3 tokens and runs of 4"):
        repeated_share([1, 2, 3])
    with pytest.raises(ExerciseError):
        repeated_share([1, 2, 3], 0)


def test_the_logprobs_of_a_text_are_those_of_the_forward_pass() -> None:
    llm, ids = LLM("tiny", dtype="float32"), [1, 40, 7, 300, 7]
    by_hand = llm.engine.forward_pass
    hidden, _ = by_hand.run([Chunk(0, 0, ids)], by_hand.allocate(1, len(ids)))
    expected = by_hand.logits(hidden).double().log_softmax(-1)[range(4), ids[1:]]
    assert logprobs(llm, ids) == pytest.approx(expected.tolist(), abs=1e-4)
