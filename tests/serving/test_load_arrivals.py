"""When requests are sent: the distributions that the report names."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import ConfigError
from minillm.lab.benchmarks.serving.arrivals import Arrivals, read_replay

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


def test_a_ramp_by_hand() -> None:
    """From 1/s to 3/s over 8 requests: 4 s, and t + t^2 / 4 arrivals until t."""
    times = Arrivals(1.0, math.inf, ramp_to=3.0).times(8, np.random.default_rng(0))
    assert times[0] == 0
    assert times[3] == pytest.approx(2.0)
    assert times[7] == pytest.approx(2 * (math.sqrt(8) - 1))


def test_a_trace_is_replayed_with_its_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 2500, "input_length": 30, "output_length": 7, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 10},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = read_replay(str(path))
    assert (first.seconds, first.input_length, first.output_length) == (0.0, 10, 0)
    assert (second.seconds, second.output_length, second.hash_ids) == (1.5, 7, (1, 2))
    path.write_text('{"seconds": 3}\n{"seconds": 3.5}')
    assert [one.seconds for one in read_replay(str(path))] == [0.0, 0.5]


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", '{"input_length": 4}', '{"timestamp": "x"}', '{"timestamp": -1}',
     '{"timestamp": 1, "seconds": 1}', '{"timestamp": 1, "output_length": -2}',
     '{"timestamp": 1, "hash_ids": 5}', '{"seconds": NaN}'],
)  # fmt: skip
def test_a_damaged_trace_is_refused_with_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1}\n' + line)
    with pytest.raises(ConfigError, match="line 2 is no request"):
        read_replay(str(path))


def test_a_missing_or_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_replay(str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="no requests"):
        read_replay(str(tmp_path / "empty"))


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
    assert "from 1 to 3" in Arrivals(1.0, 1.0, 3.0).describe()
