"""Logits and greedy tokens of every family against transformers, on tiny random checkpoints."""

import pytest

from minillm.models.families import FAMILIES
from tests.models.parity import (
    TOLERANCE,
    load,
    measure,
    reference_logits,
    relative_error,
    whole,
)
from tests.models.tiny import CASES, ROPES, prompt


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens(case, checkpoint_of):
    checkpoint = checkpoint_of(case)
    parity = measure(checkpoint, load(checkpoint))
    assert parity.holds, parity


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rope_types(family, rope, checkpoint_of):
    checkpoint = checkpoint_of(f"{family} / {rope}")
    ids = prompt(130)
    reference = reference_logits(checkpoint, ids)
    assert relative_error(whole(load(checkpoint), ids), reference) <= TOLERANCE
