"""Every family of kernels, interpreted: its cases and random ones against float64."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm_kernels.families import CHECKED, checks

# A case may overflow on purpose, and numpy says so; a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# These take a second and more each.
LONG = {"mla": (10, 20, 21, 27), "paged_attention": (15, 17, 31)}
EVERY = [
    pytest.param(family, case, id=f"{family}-{number}",
                 marks=[pytest.mark.slow] * (number in LONG.get(family, ())))
    for family in CHECKED
    for number, case in enumerate(checks(family).CASES)
]  # fmt: skip
# Random cases of each family, as many as take a second; and many.
COUNTS = {"flash_attention": 4, "paged_attention": 2, "int8_pages": 2, "mla": 3, "fused": 15,
          "gemv": 20, "sampling": 3, "moe": 4, "quantized": 20}  # fmt: skip
SOME = [pytest.param(family, count, id=family) for family, count in COUNTS.items()]
MANY = [pytest.param(family, 6 * count, id=f"{family}-many", marks=pytest.mark.slow)
        for family, count in COUNTS.items()]  # fmt: skip


@pytest.mark.parametrize(("family", "case"), EVERY)
def test_case(family: str, case: object) -> None:
    checks(family).verify(case, "cpu")


@pytest.mark.parametrize(("family", "count"), SOME + MANY)
def test_any_case(family: str, count: int) -> None:
    module = checks(family)

    @settings(max_examples=count, derandomize=True, deadline=None, database=None)
    @given(st.integers(0, 2**32 - 1))
    def verify(seed: int) -> None:
        module.verify(module.random_case(random.Random(seed)), "cpu")

    verify()


def test_every_family_has_random_cases() -> None:
    assert tuple(COUNTS) == CHECKED
