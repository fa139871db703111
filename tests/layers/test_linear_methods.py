"""oneDNN only meets a few numbers of rows, and the result is that of one product."""

import pytest
import torch

from minillm.layers.linear import Linear
from minillm.layers.linear_methods import ROWS, PackedLinearMethod, frozen, packed, row_parts

COUNTS = (0, 1, 3, 15, 16, 17, 33, 100, 300)


def test_parts_are_of_a_few_sizes_and_leave_nothing_out():
    for count in range(2000):
        parts, end = list(row_parts(count)), 0
        for start, rows, size in parts:
            assert start == end
            assert 0 < rows <= size
            assert size in ROWS
            end += rows
        assert end == count
        assert all(rows == size for _, rows, size in parts[:-1])
        assert sum(size for *_, size in parts) < count + 8 or count == 0
        assert len(parts) <= count // 256 + 3 + 3 + 1


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_rows_gives_the_product(count, biased):
    generator = torch.Generator().manual_seed(count)
    x, weight = torch.randn(count, 24, generator=generator), torch.randn(40, 24)
    bias = torch.randn(40) if biased else None
    with torch.inference_mode():
        stored = packed(weight)
        if stored is None:
            pytest.skip("oneDNN packs nothing here")
        matrix = Linear("", 24, {"": 40})
        matrix.weight = frozen(stored)
        got = PackedLinearMethod().apply(matrix, x, bias)
    assert got.shape == (count, 40)
    torch.testing.assert_close(got, torch.nn.functional.linear(x, weight, bias))
