"""The best logit and its place, against torch's own argmax."""

import math

import pytest
import torch

from minillm.argmax import RUN, first_best


def wild(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Few values, so that there are ties everywhere; some rows are special."""
    logits = (
        torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size)) * 3
    ).round()
    logits[0] = -math.inf
    logits[1, size // 2] = math.inf
    logits[2, -1] = 100.0
    logits[3] = 2.0
    logits[4] = -logits[4].abs() - 1
    logits[5, size - RUN if size > RUN else 0] = 100.0
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 5, 256, 257, 300, 384, 1000, 50_257])
def test_it_is_argmax_and_amax(size, dtype):
    logits = wild(9, size, dtype)
    best, place = first_best(logits)
    assert torch.equal(place, logits.argmax(dim=-1))
    assert torch.equal(best, logits.amax(dim=-1))
    assert place.dtype == torch.int64


@pytest.mark.parametrize("place", [0, 200, 299])
def test_nan_is_the_best(place):
    logits = wild(9, 300, torch.float32)
    logits[2:4, place] = math.nan
    logits[3, place].neg_()
    best, _ = first_best(logits)
    assert best.isnan().tolist() == [False, False, True, True, *[False] * 5]


def test_rows_of_a_larger_tensor_and_none():
    logits = wild(9, 600, torch.float32)[::2, 10:500]
    assert torch.equal(first_best(logits)[1], logits.argmax(dim=-1))
    assert first_best(logits[:0])[1].shape == (0,)
