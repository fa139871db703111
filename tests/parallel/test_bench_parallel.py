"""`minillm bench parallel`: the model that is fitted."""

from contextlib import nullcontext
from itertools import count

import pytest

from minillm.lab.benchmarks import collectives, parallel
from minillm.lab.benchmarks.parallel import fit_sums, fitted, kinds_of_ranks


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


def test_a_speed_up_compares_neighbouring_turns_after_a_warm_up(monkeypatch):
    """Turn n takes n seconds alone and n / 2 with ranks; the first turn is not counted."""
    turns, numbers = {}, count()

    def timed(llm, case):
        turn = next(turns.setdefault((llm, case), count()))
        return 100.0 if turn == 0 else turn / (1 if llm == 0 else 2)

    monkeypatch.setattr(parallel, "opened", lambda model, **kind: nullcontext(next(numbers)))
    monkeypatch.setattr(parallel, "timed", timed)
    monkeypatch.setattr(parallel, "kinds_of_ranks", lambda moe: {"tp": kinds_of_ranks(moe)["tp"]})
    found = parallel.measure("tiny", quick=True)
    assert [one["ranks"] for one in found[:2]] == ["tp", "tp, sockets"]
    assert found[0]["alone"] == (1.0, 2.0, 3.0)
    assert found[0]["speed_up"] == [2.0, 2.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sockets", "gloo"])
def test_two_processes_are_measured(kind):
    rows = collectives.measure(kind, 3)
    assert {(row["kind"], row["bytes"]) for row in rows} == {
        (kind, size) for size in collectives.SIZES
    }
    assert all(row[call] > 0 for row in rows for call in collectives.CALLS)
