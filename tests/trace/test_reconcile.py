"""A trace reconciles exactly: with the block pool after every step, with the counters, and with the
metrics of every request."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from minillm import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineDeadError, SamplingParams
from minillm.engine.live_request import LiveRequest
from minillm.engine.loop import Engine
from minillm.lab.drawings.timeline import timeline
from minillm.scheduling.record import StepRecord
from minillm.scheduling.request import Status
from minillm.trace.file import read_record
from minillm.trace.recorder import Trace
from minillm.trace.replay import PREEMPTED, RUNNING, SWAPPED, WAITING
from tests.engine.small import make, num_ahead
from tests.serving.async_small import LIMIT, Gate
from tests.trace.drafts import NGRAM, Truth, speculating
from tests.trace.workload import BLOCKS, HOST_GIB, engine, run

KINDS = [
    {"prefix_cache": "hash"}, {"prefix_cache": "radix", "swap_space": HOST_GIB},
    {"enable_prefix_caching": False, "scheduling_policy": "shortest_prefill_first"},
    {"prefix_cache": "hash", "scheduling_policy": "longest_prefix_match", "swap_space": HOST_GIB},
    {"prefix_cache": "hash", "speculative_config": NGRAM},
    {"prefix_cache": "radix", "swap_space": HOST_GIB, "wrong": 0.0},
    {"prefix_cache": "hash", "wrong": 0.3}, {"async_scheduling": True, "wrong": 0.0},
]  # fmt: skip


@contextlib.contextmanager
def engine_of(folder: Path, kind: dict[str, Any]) -> Iterator[LLM]:
    """An engine of a kind; one with `wrong` has drafts, of which that share is wrong."""
    arguments = dict(kind)
    if "wrong" in kind:
        arguments |= speculating(Truth(folder, arguments.pop("wrong")))
    with engine(folder, **arguments) as llm:
        yield llm


@pytest.fixture(scope="module", params=range(len(KINDS)))
def worked(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[LLM, list[LiveRequest]]]:
    """An engine after 60 requests, and what became of them."""
    with engine_of(folder, KINDS[request.param]) as llm:
        yield llm, run(llm, min(request.param, 5), 60)  # those with known drafts have the same work


def test_the_workload_has_all_there_is(worked: tuple[LLM, list[LiveRequest]]) -> None:
    """Else the other tests of this file would show little."""
    llm, lives = worked
    for what in ("added", "admitted", "preempted", "forked", "ended"):
        assert any(getattr(record, what) for record in llm.trace), what
    ends = {one.reason for record in llm.trace for one in record.ended}
    assert ends == {"abort", "error", "length", "stop"}
    assert {record.blocked.what for record in llm.trace if record.blocked} >= {"blocks", "tokens"}
    assert any(one.discarded for record in llm.trace for one in record.ended)
    modes = {one.mode for record in llm.trace for one in record.preempted}
    assert "recompute" in modes or llm.engine.args.swap_space
    assert ("swap" in modes) == bool(llm.engine.args.swap_space)
    assert llm.engine.scheduler.counters.num_recomputed_tokens or "recompute" not in modes
    assert len(lives) >= 60
    assert (num_ahead(llm) > 10) == bool(llm.engine.args.async_scheduling)
    drafted = [one for record in llm.trace for one in record.drafted]
    assert bool(drafted) == bool(llm.engine.args.speculative_config)
    assert any(one.num_accepted < one.num_drafted for one in drafted) == bool(drafted)
    config = llm.engine.args.speculative_config
    if config is not None and config.method != "ngram":
        assert any(0 < one.num_accepted < one.num_drafted for one in drafted)


@pytest.mark.parametrize("kind", range(len(KINDS) - 1))  # each step ends before the next
def test_every_block_table_can_be_rebuilt_after_every_step(folder: Path, kind: int) -> None:
    with engine_of(folder, KINDS[kind]) as llm:
        scheduler, trace = llm.engine.scheduler, llm.trace
        replay, applied = trace.snapshot()[0], []

        def compare() -> None:
            if trace and trace[-1:] != applied[-1:]:
                replay.apply(trace[-1])
                applied.append(trace[-1])
            elif not trace:
                return
            known = dict(scheduler.sequences)
            for added in scheduler.log._added:  # they belong to the next record
                known.pop(added, None)
            assert replay.sequences.keys() == known.keys()
            for seq_id, sequence in known.items():
                state = replay.sequences[seq_id]
                assert state.blocks == sequence.table.blocks
                assert state.num_computed == sequence.num_computed or state.where == PREEMPTED
                assert state.furthest == sequence.furthest
                prompt = len(sequence.request.prompt_token_ids)
                assert state.num_tokens == len(sequence.token_ids) - prompt
                assert state.num_draft_tokens == sequence.num_draft_tokens
                assert state.num_accepted_tokens == sequence.num_accepted_tokens
                assert (state.where == RUNNING) == (sequence.status is Status.RUNNING)
                assert (state.where == SWAPPED) == sequence.is_swapped
                assert state.where != WAITING or not sequence.num_preemptions
            counts = [len(replay.holders.get(block, ())) for block in range(BLOCKS)]
            assert counts == scheduler.blocks.pool.ref_counts

        run(llm, kind, 40, after_step=compare)
        assert len(applied) == len(trace)


def test_a_void_row_is_replayed_with_the_blocks_that_it_gave_up(folder, monkeypatch):
    """Two prompts read what the first writes in their step, and the first fails."""
    with make(folder) as llm:
        core, batch = llm.engine, llm.engine.runner.batch

        def failing(rows: Any) -> Any:
            if any(row.seq_id == 0 for row in rows):
                raise RuntimeError("planted")
            return batch(rows)

        monkeypatch.setattr(core.runner, "batch", failing)
        for name, count in (("a", 5), ("b", 3), ("c", 1)):
            prompt = [*range(8), *range(100, 100 + count)]
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            core.add(core.make_request(name, None, prompt, params))
        replay = llm.trace.snapshot()[0]
        while core.has_work:
            core.step()
            replay.apply(read_record(msgspec.json.encode(llm.trace[-1]), 10**6))
            pool = core.scheduler.blocks.pool
            for seq_id, sequence in core.scheduler.sequences.items():
                state = replay.sequences[seq_id]
                assert state.blocks == sequence.table.blocks
                assert state.num_computed == sequence.num_computed
                assert (state.where == RUNNING) == (sequence.status is Status.RUNNING)
            counts = [len(replay.holders.get(block, ())) for block in range(pool.num_blocks)]
            assert counts == pool.ref_counts
        assert [record.void for record in llm.trace if record.void] == [[1, 2]]
        ends = {one.request_id: one.ends for one in llm.trace.requests()}
        assert ends == {"a": ("error",), "b": ("length",), "c": ("length",)}
        assert "read from a row that failed" in json.dumps(timeline(llm.trace))


def test_records_add_up_to_every_counter(worked: tuple[LLM, list[LiveRequest]]) -> None:
    llm, _ = worked
    trace, counters = llm.trace, llm.engine.scheduler.counters
    firsts = [s for record, s in states_admitted_first(trace)]

    def total(name: str) -> int:
        return sum(getattr(record, name) for record in trace)

    modes = [one.mode for record in trace for one in record.preempted]
    drafted = [one for record in trace for one in record.drafted]
    most = max((one.num_drafted for one in drafted), default=0)
    mixed = [record for record in trace if record.num_prefill_tokens and record.num_decode_tokens]
    assert replace(counters) == type(counters)(
        num_steps=len(trace),
        num_mixed_steps=len(mixed),
        num_prefill_tokens=total("num_prefill_tokens"),
        num_decode_tokens=total("num_decode_tokens"),
        num_recomputed_tokens=total("num_recomputed_tokens"),
        num_prompt_tokens=sum(prompt for prompt, _ in firsts),
        num_cached_tokens=sum(cached for _, cached in firsts),
        num_preemptions_recompute=modes.count("recompute"),
        num_preemptions_swap=modes.count("swap"),
        max_num_running=max(record.num_running for record in trace),
        num_drafts=sum(one.num_drafted > 0 for one in drafted),
        num_draft_tokens=sum(one.num_drafted for one in drafted),
        num_accepted_tokens=sum(one.num_accepted for one in drafted),
        num_accepted_at=[sum(one.num_accepted > place for one in drafted) for place in range(most)],
    )


def states_admitted_first(trace: Trace) -> list[tuple[StepRecord, tuple[int, int]]]:
    """For each first admission, the tokens of the prompt and those that were cached."""
    prompts = {added.seq_id: added.num_prompt_tokens for record in trace for added in record.added}
    found = []
    for record in trace:
        starts = {row.seq_id: row.start for row in record.rows}
        for seq_id in record.admitted:
            if seq_id in prompts:
                found.append((record, (prompts.pop(seq_id), starts[seq_id])))
    return found


def test_a_replay_has_the_metrics_of_every_request(worked: tuple[LLM, list[LiveRequest]]) -> None:
    llm, lives = worked
    summaries = {one.request_id: one for one in llm.trace.requests()}
    assert summaries.keys() == {live.request.request_id for live in lives}
    for live in lives:
        output, one = live.output(), summaries[live.request.request_id]
        metrics = output.metrics
        for name in ("queue_time", "ttft", "tpot", "e2e", "num_cached_tokens",
                     "num_recomputed_tokens", "num_preemptions", "num_draft_tokens",
                     "num_accepted_tokens"):  # fmt: skip
            assert getattr(one, name) == getattr(metrics, name), (name, one, metrics)
        assert one.num_prompt_tokens == len(output.prompt_token_ids)
        lengths = tuple(len(each.token_ids) for each in output.outputs)
        reasons = tuple(each.finish_reason for each in output.outputs)
        if len(one.ends) < len(reasons):  # it ended before its completions parted
            assert set(reasons) == set(one.ends)
            assert set(lengths) == {0}
        else:
            assert (one.num_tokens, one.ends) == (lengths, reasons)
        assert sum(lengths) >= metrics.num_accepted_tokens


def test_tokens_that_a_stop_string_cuts_are_counted_nowhere(folder: Path) -> None:
    """All drafts are right, and the text ends in the middle of them."""
    prompt, params = list(range(8)), SamplingParams(max_tokens=24, seed=4, ignore_eos=True)
    with make(folder) as plain:
        (whole,) = plain.generate([prompt], params, use_tqdm=False)
    text, ids = whole.outputs[0].text, whole.outputs[0].token_ids
    cuts = 0
    for overlaps in (False, True):
        more = speculating(Truth(folder), 5) | {"async_scheduling": overlaps}
        for place in range(4, 16, 2):
            stop = text[place]
            with make(folder, **more) as llm:
                asked = replace(params, stop=[stop])
                (output,) = llm.generate([prompt], asked, use_tqdm=False)
                counters = llm.engine.scheduler.counters
                (summary,) = llm.trace.requests()
                times = llm.trace.token_times()[summary.request_id]
                drafted = [one for record in llm.trace for one in record.drafted]
                computed = sum(row.num_logits for record in llm.trace for row in record.rows)
            (one,), metrics = output.outputs, output.metrics
            assert one.token_ids == ids[: len(one.token_ids)]
            assert one.finish_reason == "stop"
            assert summary.num_tokens == (len(one.token_ids),) == (len(times),)
            # Each row yields a token that was sampled, and those that were accepted before it.
            steps = len({*times})
            assert steps + metrics.num_accepted_tokens == len(one.token_ids)
            for name in ("num_draft_tokens", "num_accepted_tokens", "tpot", "ttft", "e2e"):
                assert getattr(summary, name) == getattr(metrics, name), name
            assert metrics.num_accepted_tokens == counters.num_accepted_tokens
            assert metrics.num_accepted_tokens == sum(each.num_accepted for each in drafted)
            assert metrics.num_accepted_tokens == sum(counters.num_accepted_at)
            assert counters.num_draft_tokens == sum(each.num_drafted for each in drafted)
            cuts += computed > len(one.token_ids)
    assert cuts > 5


def test_a_bounded_trace_forgets_steps_but_not_who_runs(folder: Path) -> None:
    with engine(folder) as llm:
        whole = Trace(llm.trace.settings)
        llm.engine.trace = Trace(llm.trace.settings, capacity=40_000)

        def copy() -> None:
            if llm.trace:
                whole.append(llm.trace[-1])

        run(llm, 7, 40, after_step=copy)
        small = llm.trace
        assert 0 < len(small) < len(whole)
        assert small.num_dropped + len(small) == len(whole)
        late = {one.request_id: one for one in small.requests()}
        assert late
        assert all(late[one.request_id] == one for one in whole.requests()[-len(late) :])
        ends = [trace.snapshot()[0] for trace in (small, whole)]
        for trace, replay in zip((small, whole), ends, strict=True):
            for record in trace:
                replay.apply(record)
        assert ends[0].holders.keys() <= ends[1].holders.keys()
        assert not ends[0].sequences
        assert not ends[1].sequences


def test_a_failed_step_and_ctrl_c_are_in_the_trace(folder, monkeypatch):
    with make(folder) as llm:
        core = llm.engine

        def interrupt(plan: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(core.runner, "launch", interrupt)
        core.add(core.make_request("a", None, [1, 2, 3], SamplingParams(max_tokens=3)))
        with pytest.raises(KeyboardInterrupt):
            core.step()
        assert [(one.reason, one.discarded) for one in llm.trace[-1].ended] == [("abort", True)]
        monkeypatch.undo()
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
        steps = [record.step for record in llm.trace]
        assert steps == list(range(1, len(steps) + 1)), "numbers go on after an interruption"
        ids = [added.seq_id for record in llm.trace for added in record.added]
        assert ids == [0, 1]
        monkeypatch.setattr(core.scheduler, "commit", None)
        core.add(core.make_request("b", None, [1, 2, 3], SamplingParams(max_tokens=3)))
        with pytest.raises(EngineDeadError):
            core.step()
        assert [one.reason for one in llm.trace[-1].ended] == ["error"]
        assert [one.ends for one in llm.trace.requests()] == [("abort",), ("length",), ("error",)]


def test_ctrl_c_anywhere_in_the_books_leaves_a_trace_that_can_be_read(folder: Path) -> None:
    """At every other line of what writes records; the short trace drops one in each step."""
    with make(folder, num_gpu_blocks_override=16, max_num_seqs=3) as llm:
        core, moment = llm.engine, 0
        while True:
            moment += 2
            core.trace = Trace(llm.trace.settings, capacity=5_000)
            for name in "ab":
                params = SamplingParams(max_tokens=3, n=2, ignore_eos=True)
                core.add(core.make_request(name, None, [1, 2, 3, 4, 5], params))
            whole = interrupt_at(moment, core)
            core.add(core.make_request("c", None, [1, 2], SamplingParams(max_tokens=2)))
            while core.has_work:
                core.step()
            timeline(core.trace)
            replay, records = core.trace.snapshot()
            for record in records:
                replay.apply(record)
            assert not replay.sequences, moment
            assert not any(replay.holders.values())
            if whole:
                break
        assert moment > 100


def interrupt_at(moment: int, core: Engine) -> bool:
    """Run all requests, with KeyboardInterrupt at some line; whether it came to their end."""
    names, left = {"begin", "_fork", "finish", "_hold", "end"}, moment

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_name not in names or "minillm" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if not left:
            left = -1
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        while core.has_work:
            core.step()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
    return True


def test_a_trace_is_read_while_another_thread_records(folder, monkeypatch):
    """Whatever falls off meanwhile: who ended is whole, and so is what is drawn. The event loop
    has a turn in each step, so that it reads between steps, too, on any machine."""

    async def main() -> list[int]:
        args = AsyncEngineArgs(folder, dtype="float32", block_size=4, num_gpu_blocks_override=40)
        async with AsyncLLMEngine.from_engine_args(args) as front:
            front._engine.trace = Trace(front.trace.settings, capacity=15_000)
            Gate(front, monkeypatch).pace = asyncio.get_running_loop()
            params = SamplingParams(max_tokens=30, n=2, ignore_eos=True)
            streams = [front.generate([each, 2], params, f"r{each}") for each in range(12)]
            tasks = [asyncio.create_task(read(stream)) for stream in streams]
            seen = []
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0.001)  # a loop that never sleeps takes the interpreter's lock
                ends = {one.num_tokens for one in front.trace.requests()}
                assert ends <= {(30, 30)}
                assert len(front.trace.table(None).splitlines()) >= 1
                seen.append(len(timeline(front.trace)["steps"]["step"]))
            assert front.trace.num_dropped
            return seen

    async def read(stream: AsyncIterator) -> None:
        async for _ in stream:
            pass

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        seen = loop.run_until_complete(asyncio.wait_for(main(), LIMIT))
    assert len(set(seen)) > 1
