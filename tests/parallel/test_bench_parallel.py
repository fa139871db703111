"""`minillm bench parallel`: the model that is fitted."""

import pytest

from minillm.lab.benchmarks import collectives
from minillm.lab.benchmarks.parallel import fit_sums, fitted


def test_the_model_is_found_where_it_holds():
    points = [(size, 3e-6 + size / 8e9) for size in (4096, 65536, 2**20, 2**22)]
    latency, per_byte = fitted(points)
    assert latency == pytest.approx(3e-6)
    assert 1 / per_byte == pytest.approx(8e9)


def test_small_messages_count_as_much_as_large_ones():
    """With absolute errors the large ones would decide, and the latency could even be negative."""
    points = [(4096, 5e-6), (65536, 9e-6), (2**20, 90e-6), (2**22, 700e-6)]
    latency, per_byte = fitted(points)
    assert 0 < latency < 6e-6
    assert all(0.5 < seconds / (latency + per_byte * size) < 2 for size, seconds in points)


def test_each_kind_and_dtype_has_its_own():
    rows = [
        {"kind": kind, "dtype": "float32", "bytes": size, "sum": latency + size / 1e3}
        for kind, latency in (("gloo", 200), ("shared", 4))
        for size in (4096, 2**20)
    ]
    found = {each["kind"]: each for each in fit_sums(rows)}
    assert found["gloo"]["latency"] == pytest.approx(200e-6)
    assert found["shared"]["latency"] == pytest.approx(4e-6)
    assert found["shared"]["bandwidth"] == pytest.approx(1e9)
    assert found["gloo"]["ratios"] == pytest.approx([1, 1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sockets", "gloo"])
def test_two_processes_are_measured(kind):
    rows = collectives.measure(kind, 3)
    assert {(row["kind"], row["bytes"]) for row in rows} == {
        (kind, size) for size in collectives.SIZES
    }
    assert all(row[call] > 0 for row in rows for call in collectives.CALLS)
