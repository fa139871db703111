"""Chapter 18's own functions: capacities, choices, placements."""

from collections import Counter

import numpy as np
import pytest
import torch

from minillm import ops
from minillm_exercises.chapters import ch18


def test_a_capacity_keeps_the_first_rows():
    ids = torch.tensor([[0, 1], [0, 2], [0, 1]])
    kept = ch18.within_capacity(ids, 2, 3)
    assert kept.tolist() == [[True, True], [True, True], [False, True]]
    matrices = ch18.random_layer(3, 8)
    x, weights = torch.randn(3, 8), torch.full((3, 2), 0.5)
    whole = ops.moe_experts(x, *matrices, weights, ids)
    limited = ch18.with_capacity(x, matrices, weights, ids, 2)
    assert torch.allclose(whole[:2], limited[:2])
    want = ops.moe_experts(x[2:], *matrices, weights[2:, 1:], ids[2:, 1:])
    assert torch.allclose(limited[2:], want, atol=1e-5)


@pytest.mark.parametrize("exponent", [0.0, 0.8])
def test_the_first_choice_has_the_dist(exponent):
    dist = ch18.popularity(16, exponent, seed=3)
    assert dist.sum() == pytest.approx(1)
    assert sorted(dist / dist.max(), reverse=True) == pytest.approx(
        [1 / rank**exponent for rank in range(1, 17)]
    )
    one = ch18.choices(dist, 1, 50_000).ravel()
    assert np.bincount(one, minlength=16) / 50_000 == pytest.approx(dist, abs=0.01)
    many = ch18.choices(dist, 4, 200)
    assert all(len(set(row)) == 4 for row in many.tolist())


def test_copies_are_packed_largest_first_into_equal_slots():
    assert ch18.pack([8, 2, 1, 1], [3, 1, 1, 1], 2) == [[0, 0, 3], [0, 1, 2]]
    assert ch18.pack([9, 1, 1, 1], [1, 1, 1, 1], 2) == [[0, 3], [1, 2]]
    loads = [int(1000 / rank**0.8) for rank in range(1, 65)]
    counts = ch18.copies(loads, 8)
    placement = ch18.pack(loads, counts, 8)
    assert {len(held) for held in placement} == {9}
    found = Counter(expert for held in placement for expert in held)
    assert [found[expert] for expert in range(64)] == counts
    sums = [sum(loads[e] / counts[e] for e in held) for held in placement]
    assert np.mean(sums) / max(sums) > 0.9
