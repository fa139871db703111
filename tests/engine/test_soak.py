"""Soak: thousands of requests through a pool at 30% of demand, and nothing is left of any.

4,000 requests run on the oracle and 80 on the embedded model, in `make test-full` 18,000 and 120;
`python -m minillm.lab.benchmarks.soak` runs 2,000 on the latter. The runs themselves check
that all is free when the engine is idle, that every request ended once, and that each on the
oracle had exactly its tokens; a run of the oracle that is broken on purpose shows that they do.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from minillm.cache.blocks import AccountingError, BlockPool
from minillm.cache.manager import BlockManager
from minillm.engine.loop import Engine
from minillm.errors import EngineDeadError
from minillm.lab.benchmarks import soak
from minillm.lab.benchmarks.soak import MOST_BYTES, MOST_OBJECTS, EngineSoak, check, loads
from minillm.lab.benchmarks.soak_oracle import Broken, Load, Memory, OracleSoak, Result
from minillm.scheduling.record import Counters
from minillm.scheduling.scheduler import Scheduler

ORACLE, TINY = 18_000, 120
SIZES = [(4_000, 80), pytest.param((ORACLE, TINY), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SIZES, ids=str)
def sizes(request) -> tuple[int, int]:
    """Requests on the oracle, and on the model."""
    return request.param


@pytest.fixture(scope="module")
def results(sizes) -> list[tuple[Result, bool]]:
    """Each run, and whether it had a model."""
    oracle, tiny = sizes
    return [(kind(load).run(), kind is EngineSoak) for kind, load in loads(tiny, oracle, seed=0)]


def total(results: list[tuple[Result, bool]], name: str) -> int:
    return sum(result.counters[name] for result, _ in results)


def test_every_request_is_accounted_for(results, sizes):
    assert sum(result.requests for result, _ in results) == sum(sizes)
    for result, _ in results:
        assert sum(result.outcomes.values()) == result.requests
        assert result.outcomes["finished"] > 0.8 * result.requests
        assert result.outcomes["aborted"] > 0
    for result, with_model in results:
        if not with_model:
            assert result.outcomes["aborted"] > 500 * sizes[0] // ORACLE
            assert result.outcomes["failed"] > 50 * sizes[0] // ORACLE


def test_the_pool_has_thirty_percent_of_the_demand(results):
    for result, _ in results:
        assert result.num_blocks == pytest.approx(0.3 * result.demand_blocks, rel=0.01)


LEAST = {
    "num_preemptions_recompute": 1_000,
    "num_preemptions_swap": 1_000,
    "num_mixed_steps": 1_000,
    "num_copies": 1_000,
    "num_cached_tokens": 10_000,
    "num_revived": 1_000,
    "num_evicted": 10_000,
}


def test_a_thousand_preemptions_of_each_kind(results, sizes):
    """And everything else that a run is to count as one; in a shorter run in proportion."""
    share = sizes[0] / ORACLE
    counts = {name: total(results, name) for name in LEAST}
    assert not {name: count for name, count in counts.items() if count <= share * LEAST[name]}
    assert all(result.num_preemptions for result, _ in results)
    for result, _ in results:
        assert result.counters["max_num_running"] >= 8
        assert bool(result.counters["num_recomputed_tokens"]) == ("recompute" in result.name)


def test_memory_is_flat(results):
    """Between the first quarter and the last: Python's allocated blocks, and with a model the
    resident memory of the process, too."""
    for result, with_model in results:
        check(result, with_model)
        assert max(result.objects) - result.objects[0] <= MOST_OBJECTS


def test_growth_would_be_found(results):
    (first, _), *_, (last, _) = results
    objects, rss = list(first.objects), list(last.rss)
    try:
        first.objects[-1] += 2 * MOST_OBJECTS
        with pytest.raises(Broken, match="objects"):
            check(first, False)
        last.rss[-1] += 2 * MOST_BYTES
        with pytest.raises(Broken, match="bytes"):
            check(last, True)
    finally:
        first.objects[:], last.rss[:] = objects, rss


# ---- broken on purpose -------------------------------------------------------------------------

SMALL = Load("small", 400, "hash", "recompute", abort_rate=0.1, failure_rate=0.1)


def leaky_finish(patch: pytest.MonkeyPatch) -> None:
    """Every hundredth sequence keeps its blocks."""
    works, calls = BlockManager.release, [0]

    def release(self: BlockManager, table: Any) -> None:
        calls[0] += 1
        if calls[0] % 100:
            works(self, table)

    patch.setattr(BlockManager, "release", release)


def late_copies(patch: pytest.MonkeyPatch) -> None:
    """Copy-on-write without the copy."""
    works = BlockManager.grow

    def grow(self: BlockManager, table: Any, start: int, end: int) -> None:
        works(self, table, start, end)

    patch.setattr(BlockManager, "grow", grow)


def double_use(patch: pytest.MonkeyPatch) -> None:
    """A block that a prefix hit revives stays in the free list."""

    def share(self: BlockPool, blocks: Any) -> None:
        for block in blocks:
            self.ref_counts[block] += 1

    patch.setattr(BlockPool, "share", share)


def lost_abort(patch: pytest.MonkeyPatch) -> None:
    """Only the first sequence of a request ends."""

    def abort(self: Scheduler, request_id: str) -> None:
        for sequence in self._requests.get(request_id, [])[:1]:
            self.finish(sequence.seq_id)

    patch.setattr(Scheduler, "abort", abort)


def lazy_swap(patch: pytest.MonkeyPatch) -> None:
    """Nothing comes back from host memory."""
    patch.setattr(BlockManager, "swap_in", swapped_in_without_moves(BlockManager.swap_in))


def swapped_in_without_moves(works: Callable) -> Callable:
    def swap_in(self: BlockManager, table: Any) -> list:
        works(self, table)
        return []

    return swap_in


BREAKS = {
    "leaky finish": leaky_finish,
    "late copies": late_copies,
    "double use": double_use,
    "lost abort": lost_abort,
    "lazy swap": lazy_swap,
}


@pytest.mark.mutation
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_engine_does_not_pass(monkeypatch, name):
    mode = "swap" if name == "lazy swap" else "recompute"
    load = Load("small", 600, "radix", mode, abort_rate=0.1, failure_rate=0.1)
    BREAKS[name](monkeypatch)
    with pytest.raises((Broken, AccountingError, KeyError)):
        OracleSoak(load).run()


def test_a_wrong_token_does_not_pass(monkeypatch):
    works, calls = Memory.execute, [0]

    def execute(self: Memory, plan: Any) -> dict:
        calls[0] += 1
        sampled = works(self, plan)
        if calls[0] == 300:
            sampled[next(iter(sampled))][0] += 1
        return sampled

    monkeypatch.setattr(Memory, "execute", execute)
    with pytest.raises(Broken, match="instead of"):
        OracleSoak(SMALL).run()


@pytest.mark.mutation
def test_a_leak_is_found(monkeypatch):
    works, kept = Scheduler.add, []

    def add(self: Scheduler, request: Any) -> Any:
        kept.append(works(self, request))
        return kept[-1]

    monkeypatch.setattr(Scheduler, "add", add)
    result = OracleSoak(Load("small", 1_000, "hash", "recompute")).run()
    with pytest.raises(Broken, match="objects"):
        check(result, False)


def kept(monkeypatch: pytest.MonkeyPatch, keep: list) -> None:
    works = Engine.add

    def add(self: Engine, request: Any) -> Any:
        keep.append(works(self, request))
        return keep[-1]

    monkeypatch.setattr(Engine, "add", add)


@pytest.mark.mutation
def test_a_handle_that_somebody_keeps_is_found(monkeypatch):
    kept(monkeypatch, [])
    with pytest.raises(Broken, match="handles are left"):
        EngineSoak(Load("small", 8, "hash", "recompute")).run()


def test_a_dead_engine_ends_the_run(monkeypatch):
    monkeypatch.setattr(Counters, "add", lambda self, record: record.rows.clear())
    with pytest.raises(EngineDeadError, match="No row can be scheduled"):
        EngineSoak(Load("small", 8, "hash", "recompute")).run()


# ---- the command -------------------------------------------------------------------------------


@pytest.fixture
def printed(tmp_path, capsys, monkeypatch) -> tuple[str, dict]:
    monkeypatch.setattr(soak.torch, "set_num_threads", lambda number: None)
    path = tmp_path / "soak.json"
    assert soak.main(["--tiny", "16", "--oracle", "400", "--json", str(path)]) == 0
    return capsys.readouterr().out, json.loads(path.read_text("utf-8"))


def test_the_command_prints_a_table_and_writes_json(printed):
    text, report = printed
    assert report["benchmark"] == "soak"
    assert [run["requests"] for run in report["runs"]] == [200, 200, 8, 8]
    for run in report["runs"]:
        assert run["name"] in text
        assert sum(run["outcomes"].values()) == run["requests"]
        assert len(run["objects"]) == len(run["rss"]) == 4
    preempted = sum(
        run["counters"][f"num_preemptions_{mode}"]
        for run in report["runs"]
        for mode in ("recompute", "swap")
    )
    assert f"{preempted:,} preemptions" in text


def test_json_is_the_last_line_where_no_file_is_given(capsys, monkeypatch):
    monkeypatch.setattr(soak.torch, "set_num_threads", lambda number: None)
    assert soak.main(["--tiny", "0", "--oracle", "200"]) == 0
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert [run["requests"] for run in json.loads(last)["runs"]] == [100, 100]


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as exit_:
        soak.main(["--help"])
    assert exit_.value.code == 0
    assert "python -m minillm.lab.benchmarks.soak --tiny 0" in capsys.readouterr().out
