"""Soak of the whole engine with the embedded model: hundreds of requests through a pool with 30% of
the blocks that the running ones need, some aborted at a random moment, some bound to fail.

After each quarter the engine is idle: nothing of any request may remain, and memory may not grow
after the first quarter. The histories of `tests/scheduling` check every token on an oracle.
"""

import gc
import random
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minillm.api.arguments import EngineArgs
from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockManager
from minillm.engine.live_request import LiveRequest
from minillm.engine.loop import Engine
from minillm.errors import EngineDeadError
from minillm.scheduling import record
from minillm.scheduling.data_parallel import schedulers_of
from minillm.scheduling.scheduler import Scheduler
from minillm.trace.recorder import Trace
from tests.scheduling.invariants import check_invariants

SEATS, PROMPT, OUTPUT, BLOCK = 24, 28, 24, 4
POOL = round(0.3 * SEATS * (PROMPT + OUTPUT) / 2 / BLOCK)  # blocks
MOST_OBJECTS, MOST_BYTES = 2_000, 16 * 2**20  # growth after the first quarter


def resident_bytes() -> int:
    """Resident memory of this process; 0 if the system does not report it."""
    status = Path("/proc/self/status")
    found = re.search(r"VmRSS:\s+(\d+)", status.read_text()) if status.exists() else None
    return 1024 * int(found[1]) if found else 0


class Soak:
    """Adds requests, aborts some, and steps until all have ended; counts how they ended."""

    def __init__(self, prefix_cache: str, swaps: bool, abort_rate: float = 0.03):
        self.abort_rate, self.rng = abort_rate, random.Random(0)
        self.engine = Engine(
            EngineArgs("tiny", dtype="float32", block_size=BLOCK, num_gpu_blocks_override=POOL,
                       max_model_len=PROMPT + OUTPUT + 1, max_num_seqs=SEATS,
                       max_num_batched_tokens=64, prefix_cache=prefix_cache,
                       swap_space=0.01 if swaps else 0)
        )  # fmt: skip
        # A trace that is full after a few steps, so that memory is flat after the first quarter.
        self.engine.trace = Trace(self.engine.trace.settings, capacity=200)
        self.tokens = self.engine.source.config.vocab_size
        assert self.engine.tokenizer is not None
        for token_id in range(self.tokens):  # fills the lazy cache
            self.engine.tokenizer.token_bytes[token_id]  # type: ignore[index]
        self.scheduler = schedulers_of(self.engine.scheduler)[0]
        self.handles: weakref.WeakSet[LiveRequest] = weakref.WeakSet()
        self.live: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.objects: list[int] = []
        self.rss: list[int] = []

    def run(self, requests: int) -> "Soak":
        """Run all requests, a quarter at a time."""
        added = 0
        for quarter in range(1, 5):
            while added < requests * quarter // 4 or self.live:
                while added < requests * quarter // 4 and len(self.live) < 3 * SEATS:
                    self.add(str(added))
                    added += 1
                if self.rng.random() < self.abort_rate:
                    self.engine.abort(name := self.rng.choice(self.live))
                    self.end(name, "aborted")
                if self.live:
                    self.step()
            self.check_idle()
        assert self.outcomes.total() == requests
        return self

    def add(self, name: str) -> None:
        """Add a request with one of a few prefixes; one that is to fail excludes every token."""
        rng, tokens, end = self.rng, range(1, self.tokens), self.engine.eos_token_ids[0]
        head = random.Random(rng.randrange(6)).choices(tokens, k=rng.randrange(17))
        prompt = (*head, *rng.choices(tokens, k=rng.randint(1, PROMPT - len(head))))
        length, n = rng.randint(1, OUTPUT), rng.choices((1, 2, 3), (8, 1, 1))[0]
        fails = rng.random() < 0.02
        params = SamplingParams(
            n=n,
            max_tokens=length,
            min_tokens=length if fails else 0,
            allowed_token_ids=[end] if fails else None,
            ignore_eos=not fails,
            stop=["e"] if rng.random() < 0.3 else [],
            logprobs=1 if n > 1 else None,
        )
        salt = rng.choice(("", "", "", "other"))
        request = self.engine.make_request(name, None, prompt, params, 0, salt)
        self.handles.add(self.engine.add(request))
        self.live.append(name)

    def step(self) -> None:
        """Run a step, and check the requests that ended."""
        for live in self.engine.step():
            if live.finished:
                outputs = live.output().outputs
                reasons = {each.finish_reason for each in outputs}
                for each in outputs:
                    whole = len(each.token_ids) == live.request.max_tokens
                    assert whole or each.finish_reason != "length", "it ended early"
                self.end(live.request.request_id, "failed" if "error" in reasons else "finished")

    def end(self, name: str, outcome: str) -> None:
        """Note the end of a request, which must come exactly once."""
        self.live.remove(name)
        self.outcomes[outcome] += 1

    def check_idle(self) -> None:
        """Check that nothing of any request remains, and note the memory."""
        gc.collect()
        check_invariants(self.scheduler)
        pools = self.scheduler.blocks.pool, self.scheduler.blocks.host
        assert not self.scheduler.sequences, "sequences are left"
        assert not self.scheduler.in_flight, "rows are in flight"
        assert all(pool.num_free == pool.num_blocks for pool in pools), "blocks are held"
        assert not self.engine.has_work, "the engine has work"
        assert not self.handles, "handles are left"
        self.objects.append(sys.getallocatedblocks())
        self.rss.append(resident_bytes())

    def check_memory(self) -> None:
        """Check that memory is flat after the first quarter."""
        assert max(self.objects) - self.objects[0] <= MOST_OBJECTS, "objects"
        assert self.rss[-1] - self.rss[0] <= MOST_BYTES, "bytes"


@pytest.mark.parametrize("requests", [40, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("cache", "swaps"), [("hash", False), ("radix", True)])
def test_nothing_of_any_request_remains(cache: str, swaps: bool, requests: int) -> None:
    soak = Soak(cache, swaps).run(requests)
    soak.check_memory()
    counters = soak.scheduler.counters
    assert soak.outcomes["finished"] > 0.8 * requests
    assert soak.outcomes["aborted"] > 0
    assert counters.num_preemptions_swap if swaps else counters.num_preemptions_recompute
    assert bool(counters.num_recomputed_tokens) == (not swaps)
    assert counters.num_cached_tokens
    assert soak.scheduler.blocks.num_copies


# ---- broken on purpose -------------------------------------------------------------------------


def leaky_finish(patch: pytest.MonkeyPatch) -> None:
    """Every twentieth sequence keeps its blocks."""
    works, calls = BlockManager.release, [0]

    def release(self: BlockManager, table: Any) -> None:
        calls[0] += 1
        if calls[0] % 20:
            works(self, table)

    patch.setattr(BlockManager, "release", release)


def lost_abort(patch: pytest.MonkeyPatch) -> None:
    """Only the first sequence of a request ends."""

    def abort(self: Scheduler, request_id: str, *why: Any) -> None:
        for sequence in self._requests.get(request_id, [])[:1]:
            self.finish(sequence.seq_id)

    patch.setattr(Scheduler, "abort", abort)


def kept_by(owner: type) -> Callable[[pytest.MonkeyPatch], None]:
    """Everything that `owner.add` returns is kept for ever."""

    def broken(patch: pytest.MonkeyPatch) -> None:
        works, kept = owner.add, []  # type: ignore[attr-defined]

        def add(self: Any, request: Any) -> Any:
            kept.append(works(self, request))
            return kept[-1]

        patch.setattr(owner, "add", add)

    return broken


@pytest.mark.mutation
@pytest.mark.parametrize(
    "broken",
    [leaky_finish, lost_abort, kept_by(Engine), kept_by(Scheduler)],
    ids=["leaky_finish", "lost_abort", "engine_keeps", "scheduler_keeps"],
)
def test_a_broken_engine_does_not_pass(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, KeyError, ValueError)):
        Soak("radix", False, abort_rate=0.1).run(120).check_memory()


def test_a_dead_engine_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record.Counters, "add", lambda self, record: record.rows.clear())
    with pytest.raises(EngineDeadError, match="No row can be scheduled"):
        Soak("hash", False).run(8)
