"""The benchmarks run, say what they measured, and measure what they say. No time is checked."""

import json

import pytest

from minillm.cli import main
from minillm.lab.benchmarks import scheduler as bench
from minillm.lab.benchmarks.scheduler import Series, Workload
from minillm.scheduling.policies import POLICIES
from tests.scheduling.invariants import check_invariants

# ---- what the numbers say ---------------------------------------------------------------------


def test_growth_is_the_exponent_between_neighbouring_sizes() -> None:
    constant, linear, square = (7.0,) * 3, (3.0, 30.0, 300.0), (3.0, 300.0, 30_000.0)
    for times, exponents in ((constant, [0, 0]), (linear, [1, 1]), (square, [2, 2])):
        assert Series("a", "blocks", (1, 10, 100), times).growth() == pytest.approx(exponents)
    mixed = Series("a", "blocks", (2, 4, 16), (5.0, 10.0, 160.0))
    assert mixed.growth() == pytest.approx([1, 2])


def test_every_policy_and_both_indices_are_measured(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setattr(bench, "QUICK", bench.Sizes((1, 2), (2, 4), (1, 2), 1, 1))
    monkeypatch.setattr(bench, "BESIDE_LINE", 2)
    monkeypatch.setattr(bench.gc, "collect", lambda: None)  # of all that other tests imported
    file = tmp_path / "scheduler.json"
    assert main(["bench", "scheduler", "--quick", "--json", str(file)]) == 0
    table, found = capsys.readouterr().out.splitlines(), json.loads(file.read_text())
    names = [one["name"] for one in found["series"]]
    assert len(names) == len(set(names)) == 1 + len(POLICIES) + 2
    assert all(any(line.strip().startswith(name) for line in table) for name in names)
    for one in found["series"]:
        assert min(one["microseconds"]) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_workload_is_what_its_name_says(policy: str) -> None:
    load = Workload(8, policy)
    load.line_up(50, num_to_come=20)
    scheduler = load.scheduler
    for _ in range(20):
        load.step_with_change()
        check_invariants(scheduler)
        assert (len(scheduler.running), len(scheduler.waiting)) == (8, 50)
        assert len(scheduler.record.admitted) == 1
    assert scheduler.counters.num_preemptions_recompute == 0


def test_a_decode_step_has_decode_only_and_blocks_grow_evenly() -> None:
    load, grown = Workload(32, "fcfs"), []
    for _ in range(16):
        free = load.scheduler.blocks.pool.num_free
        load.step()
        grown.append(free - load.scheduler.blocks.pool.num_free)
        record = load.scheduler.record
        assert (record.num_decode_tokens, record.num_prefill_tokens) == (32, 0)
    assert sum(grown) == 32
    assert max(grown) <= 4


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_the_index_of_a_lookup_knows_the_text(kind: str) -> None:
    tokens = bench.text(4)
    assert bench.filled(kind, tokens).match(tokens, len(tokens), "").blocks == [0, 1, 2, 3]
