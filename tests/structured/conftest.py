"""Vocabularies and compiled constraints that the tests of this folder share."""

from pathlib import Path

import numpy as np
import pytest

from minillm import SamplingParams
from minillm.structured.grammars import Constraint, Grammars
from minillm.structured.matcher import Matcher
from minillm.text.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "minillm/assets/tiny"
PADDING = 37  # logits without a token


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """That of the embedded model, 4,096 tokens."""
    return Tokenizer.from_folder(TINY)


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    """Constraints over it, with llguidance."""
    return Grammars(tokenizer, tokenizer.vocab_size + PADDING)


def allowed(matcher: Matcher, width: int) -> np.ndarray:
    """The mask of a matcher, bool [V]."""
    bits = np.zeros(-(-width // 8), dtype=np.uint8)
    matcher.fill(bits)
    return np.unpackbits(bits, bitorder="little")[:width].astype(bool)


def masks(constraint: Constraint, position: int, drafts: list[int], width: int) -> np.ndarray:
    """The masks of a row with drafts, bool [1 + drafts, V]."""
    bits = np.zeros((1 + len(drafts), -(-width // 8)), dtype=np.uint8)
    constraint.masks(position, drafts, bits)
    return np.unpackbits(bits, axis=1, bitorder="little")[:, :width].astype(bool)


def constraint_of(
    grammars: Grammars, given: dict, tokens: list[int], first: int = 0, ends: tuple = (0,), **more
) -> Constraint:
    """The constraint of a row whose output begins at `first`."""
    params = SamplingParams(structured_outputs=given, **more)
    return Constraint(grammars, params, tokens, first, ends)
