"""The scheduler, decision by decision, on workloads small enough to follow by hand.

Blocks hold four tokens unless a test says otherwise; sampled tokens are made up, because a
scheduler looks at counts only. Every step is followed by a comparison of all books.
"""

import dataclasses
import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockManager
from minillm.errors import ConfigError, InvalidRequestError
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.request import Request, Sequence, Status
from minillm.scheduling.scheduler import Scheduler
from tests.scheduling.invariants import check_invariants

ROOT = Path(__file__).resolve().parents[2]


def scheduler(
    num_blocks: int = 32, cache: str | None = None, host: int = 0, block_size: int = 4, **config
) -> Scheduler:
    """No watermark and few seats, unless the test is about them."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "watermark": 0.0, **config}
    blocks = BlockManager(num_blocks, block_size, cache, host)
    return Scheduler(SchedulerConfig(**settings), blocks)


def request(name: str, length: int = 4, max_tokens: int = 3, n: int = 1, **fields) -> Request:
    """Prompts of different requests have no token in common, unless they are given."""
    first = 1000 * int.from_bytes(name.encode(), "big")
    prompt = tuple(fields.pop("prompt", range(first, first + length)))
    params = fields.pop("params", SamplingParams(n=n))
    return Request(name, prompt, params, max_tokens, arrival=0.0, **fields)


def made_up(plan: StepPlan) -> dict[int, list[int]]:
    return {
        row.seq_id: [7 + index for index in range(row.num_samples)]
        for row in plan.rows
        if row.num_samples
    }


def planned(engine: Scheduler) -> StepPlan:
    """The next plan, after keeping block tables as a runner does: by what plans say has changed."""
    plan = engine.schedule()
    check_invariants(engine)
    tables = vars(engine).setdefault("tables_of_runner", {})
    for seq_id in plan.dropped:
        del tables[seq_id]
    for row in plan.rows:
        table = tables.setdefault(row.seq_id, [])
        table[row.num_kept :] = row.blocks
        assert table == engine.in_flight[row.seq_id].table.blocks
    return plan


def step(engine: Scheduler) -> StepPlan:
    plan = planned(engine)
    engine.commit(plan, made_up(plan))
    check_invariants(engine)
    return plan


def drain(engine: Scheduler, most: int = 1000) -> list[StepPlan]:
    plans = []
    while engine.has_work:
        plans.append(step(engine))
        assert plans[-1].rows, "a step that computes nothing would be repeated for ever"
        assert len(plans) < most
    assert engine.blocks.pool.num_free == engine.blocks.pool.num_blocks
    assert engine.blocks.host.num_free == engine.blocks.host.num_blocks
    return plans


def stalled(engine: Scheduler) -> list[int]:
    """Who ran, but got no row in the last step."""
    return [each.seq_id for each in engine.record.stalled]


def tokens_of(plan: StepPlan) -> dict[int, int]:
    return {row.seq_id: row.num_tokens for row in plan.rows}


def random_request(rng: random.Random, name: str) -> Request:
    """Prompts that share beginnings, in lengths around a few blocks."""
    length = rng.randint(1, 14)
    prompt = [rng.choice([1, 1, 1, 2]) for _ in range(length)]
    return request(
        name, prompt=prompt, max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 1, 2, 3])
    )


def random_run(engine: Scheduler, seed: int, count: int = 60) -> list[StepPlan]:
    """Requests arrive about twice as fast as they can be served."""
    rng, plans = random.Random(seed), []
    for number in range(count):
        engine.add(random_request(rng, f"r{number}"))
        if rng.random() < 0.4:
            plans.append(step(engine))
    return plans + drain(engine)


# ---- one request, step by step ----------------------------------------------------------------


def test_a_request_from_its_prompt_to_its_last_token() -> None:
    engine = scheduler()
    sequence = engine.add(request("a", length=6, max_tokens=3))
    first = step(engine)
    assert (first.new[0].seq_id, first.new[0].token_ids) == (0, sequence.request.prompt_token_ids)
    assert first.rows == [(0, 0, 6, 1, 0, 0, (0, 1))]
    assert step(engine).rows == [(0, 6, 1, 1, 0, 2, ())]  # in the blocks it has
    assert step(engine).rows == [(0, 7, 1, 1, 0, 2, ())]
    assert sequence.token_ids[6:] == [7, 7, 7]
    assert sequence.status is Status.FINISHED
    assert not engine.has_work
    assert step(engine).dropped == [0]


def test_rows_with_one_token_come_first_whoever_was_scheduled_first() -> None:
    engine = scheduler()
    for name, length in (("a", 5), ("b", 1), ("c", 3), ("d", 1)):
        engine.add(request(name, length=length))
    assert [(row.seq_id, row.num_tokens) for row in step(engine).rows] == [
        (1, 1), (3, 1), (0, 5), (2, 3)
    ]  # fmt: skip
    drain(engine)


# ---- the tests that would have caught the published bugs --------------------------------------


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_identical_prompts_in_one_batch_have_blocks_of_their_own(cache: str) -> None:
    """mini-sglang left the second one's table with pages of the free list."""
    engine = scheduler(cache=cache)
    twice = SamplingParams(prompt_logprobs=0)  # which reads no prefix
    twins = [engine.add(request(name, prompt=range(9), params=twice)) for name in "abc"]
    step(engine)
    assert [twin.table.blocks for twin in twins] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    engine.abort("a")  # its blocks are the cached ones
    check_invariants(engine)
    drain(engine)


# ---- rows that read what another row of the same step writes -----------------------------------


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_prompts_that_come_together_compute_their_common_beginning_once(cache: str) -> None:
    engine = scheduler(16, cache, max_num_batched_tokens=32)
    sequences = [  # eight tokens in common, with 5, 3 and 1 behind them
        engine.add(request(name, prompt=[*range(8), *range(first, first + count)], max_tokens=5))
        for name, first, count in (("a", 100, 5), ("b", 200, 3), ("c", 300, 1))
    ]
    plan = step(engine)
    # A row that reads another's blocks comes behind it, however short it is.
    assert [(row.seq_id, row.start, row.num_tokens) for row in plan.rows] == [
        (0, 0, 13), (1, 8, 3), (2, 8, 1)
    ]  # fmt: skip
    assert [one.table.blocks[:2] for one in sequences] == [[0, 1]] * 3
    assert [one.report.cached for one in sequences] == [0, 8, 8]
    assert engine.counters.num_cached_tokens == 16
    check_invariants(engine)
    drain(engine)


def test_a_request_that_can_never_fit_is_refused_and_the_rest_goes_on() -> None:
    """nano-vllm died of an assertion here, mini-sglang left the client waiting."""
    engine = scheduler(num_blocks=4)
    engine.add(request("a"))
    with pytest.raises(
        InvalidRequestError,
        match=r"never fit: 10 prompt \+ 8 new tokens need 5 blocks of 4 positions, and the KV "
        r"cache has 4; lower max_tokens, or",
    ):
        engine.add(request("b", length=10, max_tokens=8))
    with pytest.raises(ValueError, match="never fit"):
        engine.add(request("b", length=100))
    assert len(engine.sequences) == 1
    drain(engine)


def test_the_running_set_never_exceeds_its_cap() -> None:
    """nano-vllm's cap held for a step and not for the running set, which grew to 12 of 4."""
    engine = scheduler(64, max_num_seqs=4)
    for number in range(20):
        engine.add(request(f"r{number}", max_tokens=30))
        step(engine)
        assert len(engine.running) <= 4
    assert engine.counters.max_num_running == 4
    assert len(tokens_of(step(engine))) == 4  # and all of them advance
    drain(engine)


def test_a_stream_of_arrivals_never_starves_decode() -> None:
    """nano-vllm: no decode step in 20, with one arrival per step."""
    engine = scheduler(400, max_num_seqs=8, max_num_batched_tokens=16)
    first = engine.add(request("first", max_tokens=40))
    step(engine)
    for number in range(30):
        engine.add(request(f"r{number}", length=16, max_tokens=2))
        plan = step(engine)
        assert tokens_of(plan)[first.seq_id] == 1
    assert engine.counters.num_mixed_steps == 30


@pytest.mark.parametrize("urgency", [0, -1], ids=["behind the others", "before the others"])
def test_one_long_prompt_never_starves_decode(urgency: int) -> None:
    engine = scheduler(64, policy="priority", max_num_batched_tokens=8)
    for name in "abc":
        engine.add(request(name, length=2, max_tokens=30))
    step(engine)
    long = engine.add(request("long", length=50, max_tokens=1, priority=urgency))
    for _ in range(10):  # 50 tokens, 5 at a time beside the three
        assert tokens_of(step(engine)) == {0: 1, 1: 1, 2: 1, long.seq_id: 5}
    assert long.status is Status.FINISHED


CODE = """
import sys; sys.path.insert(0, ".")
from tests.scheduling.test_scheduler import digest; print(digest())
"""


def digest() -> str:
    """Of all plans of two random workloads."""
    total = hashlib.sha256()
    for mode in ("recompute", "swap"):
        engine = scheduler(12, "radix", host=8, preemption_mode=mode, max_num_batched_tokens=10)
        for plan in random_run(engine, seed=3, count=40):
            total.update(json.dumps(dataclasses.asdict(plan)).encode())
    return total.hexdigest()


def test_the_order_is_the_same_in_every_process() -> None:
    """mini-sglang kept its running set as a set: rows came in another order in each process."""
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", CODE], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert (done.stdout.strip(), done.stderr) == (digest(), "")


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "asked", "message"),
    [
        ({}, {"n": 5}, "n is 5, but at most 4 sequences run at once"),
        # Two blocks of prompt, and one more for each of the two that part.
        ({"num_blocks": 3}, {"length": 8, "max_tokens": 2, "n": 3},
         r"n = 3, need 4 blocks of 4 .* cache has 3; .*n"),
        # One shared block, and 3 x 2 for the rest.
        ({"num_blocks": 6, "admission": "reserve_max"}, {"length": 6, "max_tokens": 4, "n": 3},
         r"6 prompt \+ 4 new tokens, n = 3, need 7"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 16},
         {"length": 10, "max_tokens": 8}, r"10 prompt \+ 8 new .* one step, which has 16 tokens"),
    ],
)  # fmt: skip
def test_what_can_never_run_is_refused(limits: dict, asked: dict, message: str) -> None:
    engine = scheduler(**limits)
    with pytest.raises(InvalidRequestError, match=message):
        engine.add(request("a", **asked))
    if len(limits) > 1:  # one block or token less is enough
        more = {"num_blocks": limits.get("num_blocks", 31) + 1}
        less = {"max_tokens": asked["max_tokens"] - (asked["length"] == 10)}
        engine = scheduler(**limits | more)
        engine.add(request("a", **asked | less))
        drain(engine)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0; it must be at least 1"),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            r"max_num_batched_tokens is 8; it must be at least max_num_seqs \(9\)",
        ),
        ({"long_prefill_token_threshold": -1}, "threshold is -1; it must be 0"),
        (
            {"long_prefill_token_threshold": 5, "enable_chunked_prefill": False},
            "splits prompts, which enable_chunked_prefill=False forbids",
        ),
        ({"watermark": 1.0}, "watermark is 1.0; it must be from 0 to below 1"),
        ({"watermark": -0.1}, "watermark is -0.1"),
        ({"watermark": float("nan")}, "watermark is nan"),
        ({"watermark": "a"}, "watermark is 'a'"),
        ({"policy": "lifo"}, "policy is 'lifo'; it must be one of fcfs, priority, shortest_p"),
        (
            {"admission": "none"},
            "admission_policy is 'none'; it must be one of watermark, reserve_max",
        ),
        ({"preemption_mode": "kill"}, "preemption_mode is 'kill'; it must be one of recompute"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_value(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**values)


def test_who_is_gone_is_not_there_to_be_aborted_or_finished() -> None:
    engine = scheduler(5, host=8, preemption_mode="swap", max_num_batched_tokens=6)
    engine.add(request("other", length=7, max_tokens=8))
    sequence = engine.add(request("a", length=7, max_tokens=8))
    while not sequence.is_swapped:
        step(engine)
    for _ in range(2):
        engine.abort("a")
        engine.finish(sequence.seq_id)
        check_invariants(engine)
    assert sequence.status is Status.FINISHED
    drain(engine)
    engine.abort("never heard of")


# ---- chunks and seats -------------------------------------------------------------------------


def test_the_threshold_limits_each_prompt_and_leaves_room_for_the_next() -> None:
    engine = scheduler(max_num_batched_tokens=8, long_prefill_token_threshold=3)
    for name in "abc":
        engine.add(request(name, length=7, max_tokens=1))
    assert tokens_of(step(engine)) == {0: 3, 1: 3, 2: 2}
    assert tokens_of(step(engine)) == {0: 3, 1: 3, 2: 2}
    assert tokens_of(step(engine)) == {0: 1, 1: 1, 2: 3}
    assert (engine.has_work, engine.counters.num_prefill_tokens) == (False, 21)


def test_without_chunks_a_prompt_is_computed_whole_or_waits() -> None:
    engine = scheduler(enable_chunked_prefill=False, max_num_batched_tokens=16)
    engine.add(request("a", length=10))
    engine.add(request("b", length=7))
    assert tokens_of(step(engine)) == {0: 10}
    assert str(engine.record.blocked) == "no tokens: needs 7, has 6"
    assert tokens_of(step(engine)) == {0: 1, 1: 7}
    drain(engine)


def test_a_prompt_for_n_completions_takes_n_seats_and_one_computation() -> None:
    engine = scheduler(max_num_seqs=4)
    engine.add(request("a", length=6, max_tokens=3))
    engine.add(request("b", length=6, max_tokens=3, n=3))
    engine.add(request("c", length=6, max_tokens=3))
    plan = step(engine)
    assert tokens_of(plan) == {0: 6, 1: 6}
    assert [row.num_samples for row in plan.rows] == [1, 3]
    assert str(engine.record.blocked) == "no batch slots: needs 1, has 0"
    plan = step(engine)
    assert tokens_of(plan) == {0: 1, 1: 1, 3: 1, 4: 1}
    assert [new.sample_index for new in plan.new] == [1, 2]
    assert len(plan.copies) == 2  # three share the partly filled block
    drain(engine)


# ---- memory -----------------------------------------------------------------------------------


def pressed(
    mode: str, cache: str | None = None, host: int = 8, **fields
) -> tuple[Scheduler, Sequence]:
    """Two sequences of 7 + 8 tokens in five blocks; the second has lost its blocks to the first.

    Both hold two blocks. At position 8 each needs a third: the first takes the fifth block, the
    second finds none and stalls. At position 12 the first needs another one and preempts it.
    """
    engine = scheduler(5, cache, host, preemption_mode=mode)
    engine.add(request("a", length=7, max_tokens=8, **fields))
    second = engine.add(request("b", length=7, max_tokens=8, **fields))
    step(engine)
    step(engine)
    assert second.num_computed == 8
    step(engine)
    assert stalled(engine) == [second.seq_id]
    assert str(engine.record.stalled[0]) == "no blocks: needs 1, has 0"
    while not engine.record.preempted:
        step(engine)
    return engine, second


def test_preemption_by_recompute_starts_again_and_counts_it() -> None:
    engine, second = pressed("recompute")
    assert engine.record.preempted == [(1, 0, "recompute", 8)]
    assert (second.num_computed, second.table.blocks, second.num_preemptions) == (0, [], 1)
    assert engine.record.num_waiting == 1
    drain(engine)
    assert (second.num_recomputed, engine.counters.num_recomputed_tokens) == (8, 8)
    assert engine.counters.num_preemptions_recompute == 1
    assert second.num_tokens == 15


def test_who_is_in_this_step_already_is_not_preempted_in_it() -> None:
    """Four blocks: d has two, and the urgent prompt two of the three that it needs."""
    engine = scheduler(4, policy="priority", long_prefill_token_threshold=4)
    behind = engine.add(request("d", length=3, max_tokens=12))
    step(engine)
    urgent = engine.add(request("urgent", length=12, max_tokens=1, priority=-1))
    step(engine)
    step(engine)
    for _ in range(3):  # d computes 5, 6 and 7 in its second block
        assert tokens_of(step(engine)) == {behind.seq_id: 1}
        assert (stalled(engine), engine.record.preempted) == ([urgent.seq_id], [])
    assert tokens_of(step(engine)) == {urgent.seq_id: 4}  # d, too, needs a block now: it loses
    assert engine.record.preempted == [(behind.seq_id, urgent.seq_id, "recompute", 8)]
    drain(engine)


def test_preemption_by_swap_computes_nothing_again() -> None:
    engine, second = pressed("swap")
    assert engine.record.preempted == [(1, 0, "swap", 8)]
    assert second.is_swapped
    assert second.num_computed == 8
    plans = drain(engine)
    (back,) = [plan for plan in plans if plan.swap_in]
    assert [copy.source for copy in back.swap_in] == [0, 1]
    assert [row.start for row in back.rows if row.seq_id == second.seq_id] == [8]
    counters = engine.counters
    assert (counters.num_preemptions_swap, counters.num_recomputed_tokens) == (1, 0)
    assert counters.num_prefill_tokens + counters.num_decode_tokens == 2 * 14


def test_the_watermark_keeps_blocks_free_for_those_who_run() -> None:
    """10 blocks, 2 of them kept: after 5 were taken, only 3 of the other 5 are for admission."""
    engine = scheduler(10, watermark=0.2)
    engine.add(request("a", length=20, max_tokens=2))
    engine.add(request("b", length=16, max_tokens=2))
    step(engine)
    assert str(engine.record.blocked) == "no blocks: needs 4, has 3"
    drain(engine)


def test_the_watermark_does_not_keep_the_only_request_out() -> None:
    engine = scheduler(10, watermark=0.9)
    engine.add(request("a", length=36, max_tokens=4))
    assert len(step(engine).rows) == 1


def test_chunks_to_come_are_not_promised_to_somebody_else() -> None:
    """The first prompt needs 5 blocks and has 2 after its first chunk: 3 stay reserved for it."""
    engine = scheduler(7, max_num_batched_tokens=8)
    engine.add(request("a", length=20, max_tokens=1))
    engine.add(request("b", length=12, max_tokens=1))
    step(engine)
    assert str(engine.record.blocked) == "no tokens: needs 1, has 0"
    step(engine)
    step(engine)
    assert str(engine.record.blocked) == "no blocks: needs 3, has 2"
    assert engine.counters.num_preemptions_recompute == 0
    drain(engine)


def test_a_partial_hit_that_does_not_fit_with_its_source_is_done_without() -> None:
    """Block 0, two more for the rest of the prompt, and the source until it is copied would be
    four of three blocks."""
    engine = scheduler(3, "radix")
    engine.add(request("a", prompt=[1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1))
    drain(engine)
    again = engine.add(request("b", prompt=[1, 2, 3, 4, 5, 6, 9, 9, 9], max_tokens=1))
    (row,) = step(engine).rows
    assert (row.start, row.num_tokens) == (4, 5)
    assert again.report.cached == 4
    assert engine.blocks.num_copies == 0


# ---- records ----------------------------------------------------------------------------------


def test_the_record_says_who_waits_for_how_many_blocks() -> None:
    engine = scheduler(10)
    engine.add(request("a", length=28, max_tokens=1))
    late = engine.add(request("b", length=28, max_tokens=1))
    step(engine)
    record = engine.record
    assert str(record.blocked) == "no blocks: needs 7, has 3"
    assert (record.blocked.request_id, record.blocked.seq_id) == ("b", late.seq_id)
    assert (record.admitted, record.num_running, record.num_waiting) == ([0], 1, 1)
    assert (record.num_prefill_tokens, record.num_decode_tokens) == (28, 0)
    assert record.num_free_blocks == 3


@pytest.mark.parametrize("admission", ["watermark", "reserve_max"])
def test_a_refusal_that_is_repeated_tells_todays_numbers(admission: str) -> None:
    """b is looked up once in 16 steps, while a takes block after block."""
    engine = scheduler(12, admission=admission, watermark=0)
    engine.add(request("a", length=4, max_tokens=20))
    engine.add(request("b", length=47, max_tokens=1))
    seen = []
    for _ in range(14):
        plan = planned(engine)
        blocked = engine.record.blocked
        promised = engine.admission.num_reserved(engine.running)
        assert blocked.available == engine.record.num_free_blocks - promised
        seen.append(blocked.available)
        engine.commit(plan, made_up(plan))
    assert (seen[-1] < seen[0]) == (admission == "watermark"), seen


def test_the_record_says_why_a_running_sequence_got_no_row() -> None:
    """Two completions decode, and the chunk of b uses up what is left for c."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 4, "long_prefill_token_threshold": 2}
    engine = scheduler(20, **limits)
    engine.add(request("a", length=1, n=2))
    engine.add(request("b", length=12))
    late = engine.add(request("c", length=12))
    assert tokens_of(step(engine)) == {0: 1, 1: 2, 2: 1}
    step(engine)
    assert stalled(engine) == [late.seq_id]
    assert str(engine.record.stalled[0]) == "no tokens: needs 1, has 0"


def test_a_chunk_takes_the_blocks_there_are() -> None:
    """The first in line is a long prompt; a decode takes the block it would need for its chunk."""
    engine = scheduler(6, max_num_batched_tokens=12, watermark=0)
    engine.add(request("a", length=4, max_tokens=9))
    step(engine)
    prompt = engine.add(request("b", length=16, max_tokens=1))
    step(engine)
    assert prompt.num_computed == 11  # 12 less the decode of a, in three of the four blocks left
    thief = engine.blocks.pool.allocate(1)  # as if somebody had decoded into the last one
    plan = engine.schedule()
    assert [(row.seq_id, row.num_tokens) for row in plan.rows] == [(0, 1), (prompt.seq_id, 1)]
    assert engine.record.stalled == []
    engine.commit(plan, {0: [5]})
    engine.blocks.pool.release(thief)
    drain(engine)


# ---- plans are plain data ---------------------------------------------------------------------


def test_a_decode_step_without_new_blocks_is_small() -> None:
    engine = scheduler(400, max_num_seqs=64, block_size=16, max_num_batched_tokens=8192)
    for number in range(64):
        engine.add(request(f"r{number}", length=65, max_tokens=10))
    step(engine)
    plan = step(engine)
    assert len(plan.rows) == 64
    assert [plan.new, plan.copies, plan.swap_in, plan.swap_out, plan.dropped] == [[]] * 5
    assert all((row.blocks, row.num_kept) == ((), 5) for row in plan.rows)
    rows = json.dumps(dataclasses.asdict(plan)["rows"])
    assert len(rows) < 64 * 30  # characters; a table of 5 blocks a row would be more
    assert len(pickle.dumps(plan)) < 64 * 40
