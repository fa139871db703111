"""Interpreted attention beside torch's own, which nobody here wrote."""

import pytest

from minillm_kernels.check.second_opinion import DTYPES, JUDGES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", JUDGES)
def test_torch_says_the_same(family, dtype):
    JUDGES[family](dtype, "cpu")
