"""When requests are sent: the distributions that the report names."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.lab.benchmarks.serving.workload import Arrivals

COUNT = 20_000


def gaps(arrivals: Arrivals, seed: int, count: int = COUNT) -> np.ndarray:
    return np.diff(arrivals.times(count, np.random.default_rng(seed)))


@settings(max_examples=25, deadline=None)
@given(
    rate=st.floats(0.05, 500),
    burstiness=st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]),
    seed=st.integers(0, 2**31),
)
def test_gamma_gaps_have_the_mean_and_variation_of_the_rate_and_burstiness(rate, burstiness, seed):
    found = gaps(Arrivals(rate, burstiness), seed)
    variation = 1 / math.sqrt(burstiness)
    # Six standard errors of each estimate; a gamma distribution has excess kurtosis 6 / shape.
    assert found.mean() * rate == pytest.approx(1, abs=6 * variation / math.sqrt(COUNT))
    error = 6 * math.sqrt((2 + 6 / burstiness) / COUNT) / 2
    assert found.std() / found.mean() == pytest.approx(variation, rel=error)


@given(rate=st.floats(0.1, 100), seed=st.integers(0, 1000))
def test_one_seed_gives_the_same_process_at_each_rate(rate: float, seed: int) -> None:
    one, two = gaps(Arrivals(rate), seed, 50), gaps(Arrivals(2 * rate), seed, 50)
    assert np.allclose(one, 2 * two)


def test_burstiness_one_is_a_poisson_process() -> None:
    """Gaps are exponential: the share above t is exp(-t * rate)."""
    found = gaps(Arrivals(10.0), seed=3)
    for t in (0.02, 0.1, 0.3):
        share = math.exp(-10 * t)
        error = 5 * math.sqrt(share * (1 - share) / COUNT)
        assert (found > t).mean() == pytest.approx(share, abs=error)


def test_constant_gaps_and_all_at_once() -> None:
    rng = np.random.default_rng(0)
    assert Arrivals(4.0, math.inf).times(4, rng).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert Arrivals(math.inf).times(3, rng).tolist() == [0.0, 0.0, 0.0]


def test_the_description_names_the_process() -> None:
    assert Arrivals(2.0).describe() == "Poisson arrivals"
    assert "burstiness 0.5" in Arrivals(2.0, 0.5).describe()
    assert Arrivals(2.0, math.inf).describe() == "constant gaps"
