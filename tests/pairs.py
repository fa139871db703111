"""Products of settings of which `make test` runs a part, and `make test-full` all."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any]) -> list:
    """Parameters for all combinations of three or more axes. Those that are not marked slow are one
    in as many as the shortest axis is long, and any two settings of two axes meet in one of them.

    Each combination of the other axes has one setting of the shortest, because the sum of all
    indices is a multiple of its length.
    """
    if len(axes) < 3:
        raise ValueError(f"Any two settings of {len(axes)} axes meet only in the whole product.")
    shortest = min(map(len, axes))
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, indices, strict=True)),
            marks=[pytest.mark.slow] if sum(indices) % shortest else [],
        )
        for indices in product(*(range(len(axis)) for axis in axes))
    ]


def part_and_rest(part: range, whole: int) -> list:
    """Parameters: the seeds of `make test`, and those up to `whole`, which are slow."""
    rest = pytest.param(range(part.stop, whole), id="all", marks=pytest.mark.slow)
    return [pytest.param(part, id="usual"), rest]
