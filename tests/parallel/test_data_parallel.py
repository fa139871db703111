"""Copies of a model with own requests: a copy without work keeps no other waiting (B10 of the
parallelism notes), and what they send, refuse and record. Their tokens are in `tests/matrix`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from minillm.execution.runner import Runner
from minillm.parallel import rank
from minillm.parallel.communicator import Traffic
from minillm.parallel.experts import DispatchedExperts
from minillm.scheduling.data_parallel import schedulers_of
from minillm.speculative.proposer import DraftRow
from minillm.trace.replay import Replay
from tests.engine.small import make
from tests.matrix.cells import folder_of
from tests.matrix.jobs import Job, generate
from tests.parallel.rank_groups import KINDS as GROUPS
from tests.parallel.rank_groups import on_all, ranks
from tests.scheduling.invariants import check_invariants


class Told:
    """It drafts the tokens that it was told for a prompt."""

    def __init__(self, told: dict[tuple[int, ...], Sequence[int]]):
        self.told = told

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        answers = []
        for row in rows:
            length = row.new.num_prompt_tokens
            tokens = self.told[tuple(row.token_ids[:length])]
            done = len(row.token_ids) - length
            answers.append(list(tokens[done : done + row.num_drafts]))
        return answers


def test_a_stop_text_inside_the_last_accepted_drafts_is_its_own_copys():
    """The text ends before the tokens that its step accepted, of which the last is the last by
    count: the record of the sequence's own copy is corrected."""
    plain, told, jobs = LLM("tiny", dtype="float32"), {}, []
    free = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for text in (
        "def add(a, b):",
        "class Node:",
        "import os",
        "for i in range(",
        "if x is",
        "x = [",
    ):
        (output,) = plain.generate(text, free, use_tqdm=False)
        ids, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        parts = [plain.tokenizer.decode([each]) for each in tokens]
        if parts[2].strip() and parts[2] not in parts[0] + parts[1]:
            told[tuple(ids)] = tokens
            jobs.append(Job("", tuple(ids), replace(free, stop=[parts[2]])))
    assert len(jobs) >= 2
    llm = LLM(
        "tiny",
        dtype="float32",
        data_parallel_size=2,
        distributed_executor_backend="threads",
        speculative_config={"method": Told(told), "num_speculative_tokens": 5},
    )
    outputs = [each.outputs[0] for each in generate(llm, jobs)]
    assert {each.finish_reason for each in outputs} == {"stop"}
    ended = [one for record in llm.trace for one in record.ended]
    assert [(one.reason, one.num_tokens) for one in ended] == [("stop", 3)] * len(jobs)
    for each in schedulers_of(llm.engine.scheduler):
        assert each.counters.num_accepted_tokens == each.counters.num_drafts > 0
    llm.close()


# ---- a copy without work ------------------------------------------------------------------------

WIDE = {"max_model_len": 128, "num_gpu_blocks_override": 120}
LONG = SamplingParams(temperature=1.0, max_tokens=100, ignore_eos=True, seed=5)


@pytest.fixture(scope="module")
def folder() -> Path:
    """A mixture of experts."""
    return folder_of("qwen3_moe")


def open_copies(folder: Path, **more: Any) -> LLM:
    """Two copies that share experts, as threads unless it says otherwise."""
    usual = {"data_parallel_size": 2, "enable_expert_parallel": True}
    return make(folder, **WIDE | usual | {"distributed_executor_backend": "threads"} | more)


def ids(start: int, length: int = 9) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(start * 31 + 7 * i) % 97 for i in range(length)]}


def steps_of(llm: LLM) -> list[int]:
    """Steps in which each copy had something to compute."""
    return [each.counters.num_steps for each in schedulers_of(llm.engine.scheduler)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["threads", "mp"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_b10_a_copy_may_be_without_work_for_100_steps(folder, backend, overlaps):
    """vllm #43547, #51984: an idle rank skips the exchanges of a step, and the others wait."""
    with_one = make(folder, **WIDE)
    alone = [with_one.generate(ids(each), LONG, use_tqdm=False)[0] for each in (1, 2)]
    llm = open_copies(folder, distributed_executor_backend=backend, async_scheduling=overlaps)
    try:
        (first,) = llm.generate(ids(1), LONG, use_tqdm=False)
        busy, idle = steps_of(llm)
        assert (busy >= 100, idle) == (True, 0)
        both = llm.generate([ids(1), ids(2)], LONG, use_tqdm=False)
        assert steps_of(llm)[1] >= 100
    finally:
        llm.close()
    tokens = [each.outputs[0].token_ids for each in (first, *both)]
    assert tokens == [each.outputs[0].token_ids for each in (alone[0], *alone)]


@pytest.mark.mutation
def test_b10_planted_a_copy_without_work_skips_the_exchanges(folder, monkeypatch):
    monkeypatch.setattr(rank, "LockstepRunner", Runner)
    monkeypatch.setattr("minillm.parallel.launch.PATIENCE", 1.0)
    llm = open_copies(folder)
    with pytest.raises(EngineDeadError, match=r"stopped|waited"):
        llm.generate(ids(1), LONG, use_tqdm=False)
    llm.close()


# ---- what is sent -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("size", [2, 3])
def test_all_to_all_brings_each_row_to_its_rank(kind, size):
    counts = torch.tensor([[(3 * a + 5 * b) % 4 for b in range(size)] for a in range(size)])
    counts[1] = 0  # one has nothing to send
    rows = [
        torch.tensor(
            [[100 * a + 10 * b + i, -1] for b in range(size) for i in range(int(counts[a, b]))],
            dtype=torch.int32,
        ).view(-1, 2)
        for a in range(size)
    ]
    group = ranks(kind, size)
    found = on_all([lambda r=r: group[r].all_to_all(rows[r], counts) for r in range(size)])
    for rank_, got in enumerate(found):
        wanted = [
            [100 * a + 10 * rank_ + i, -1] for a in range(size) for i in range(counts[a, rank_])
        ]
        assert got.tolist() == wanted
        others = len(rows[rank_]) - int(counts[rank_, rank_])
        assert group[rank_].traffic == {"all_to_all": Traffic(1, 8 * others)}
    for each in group:
        each.close()


def test_exchanges_and_bytes_are_those_of_the_formula(folder):
    """Three exchanges per layer of experts. A token's row of d values, its k weights and ids go to
    each other rank that has one of its experts, and a row of d values comes back."""
    llm = open_copies(folder, enable_prefix_caching=False)
    runners = llm.engine.runner.runners  # type: ignore[attr-defined]
    sent = [0, 0]
    for index, runner in enumerate(runners):
        for layer in runner.model.modules():
            if isinstance(layer, DispatchedExperts):
                layer.register_forward_pre_hook(
                    lambda module, args, i=index: sent.__setitem__(
                        i, sent[i] + int((args[2] // len(module.own.held) != i).any(1).sum())
                    )
                )
    params = replace(LONG, max_tokens=40)
    llm.generate([ids(1, 20), ids(2, 11), ids(3, 5)], params, use_tqdm=False)
    config, places = llm.engine.source.config, llm.engine.runner.places  # type: ignore[attr-defined]
    layers = sum(map(config.is_moe_layer, range(config.num_layers)))
    steps = llm.engine.scheduler.counters.num_steps
    k, d = config.moe.num_experts_per_token, config.hidden_size
    for place, own, others in zip(places, sent, sent[::-1], strict=True):
        assert place.traffic["gather"] == Traffic(layers * steps, layers * steps * 2 * 8)
        there, back = own * (4 * d + 4 * k + 8 * k), others * 4 * d
        assert place.traffic["all_to_all"] == Traffic(2 * layers * steps, there + back)
    assert min(sent) > 40
    llm.close()


# ---- requests, limits, records ------------------------------------------------------------------


def test_requests_go_to_the_copy_with_the_least_work(folder):
    llm = open_copies(folder)
    engine = llm.engine
    for name in range(6):
        prompt = ids(name)["prompt_token_ids"]
        engine.add(engine.make_request(str(name), None, prompt, LONG))
    assert [len(each.waiting) for each in schedulers_of(engine.scheduler)] == [3, 3]
    for name in (0, 2, 4):
        engine.abort(str(name))
    prompt = ids(9)["prompt_token_ids"]
    engine.add(engine.make_request("more", None, prompt, LONG))
    assert [len(each.waiting) for each in schedulers_of(engine.scheduler)] == [1, 3]
    with pytest.raises(InvalidRequestError, match="id '1' already"):
        engine.add(engine.make_request("1", None, prompt, LONG))
    engine.abort("1")
    while engine.has_work:
        engine.step()
    llm.close()


def test_an_abort_reaches_each_copy_and_frees_its_blocks(folder):
    llm = open_copies(folder, async_scheduling=True)
    engine = llm.engine
    for name in range(4):
        prompt = ids(name)["prompt_token_ids"]
        engine.add(engine.make_request(str(name), None, prompt, LONG))
    for _ in range(5):
        engine.step()
    for name in range(4):
        engine.abort(str(name))
    assert not engine.has_work
    for each in schedulers_of(engine.scheduler):
        check_invariants(each)
        assert each.blocks.pool.num_free == each.blocks.pool.num_blocks
        assert not each.in_flight
    (output,) = llm.generate(ids(1), LONG, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 100
    llm.close()


def test_the_trace_of_copies_replays(folder):
    """Blocks of a joint record are numbered over all copies, so no two sequences share one."""
    llm = open_copies(folder, num_gpu_blocks_override=40, enable_prefix_caching=False)
    short = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, seed=5)
    llm.generate([ids(each, 30) for each in range(12)], short, use_tqdm=False)
    trace = llm.trace
    assert trace.settings.num_blocks == 80
    replay, most = Replay(), 0
    for record in trace:
        replay.apply(record)
        held = [block for each in replay.sequences.values() for block in each.blocks]
        assert len(held) == len(set(held))
        most = max([most, *held])
    assert 40 <= most < 80
    counters, ended = llm.engine.scheduler.counters, sum(len(each.ended) for each in trace)
    assert ended == 12
    assert counters.num_prefill_tokens == sum(each.num_prefill_tokens for each in trace)
    assert counters.num_decode_tokens == sum(each.num_decode_tokens for each in trace)
    assert counters.num_preemptions_recompute == sum(len(each.preempted) for each in trace) > 0
    assert all(len(each.ranks) == 2 for each in trace)
    llm.close()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"data_parallel_size": 4}, "4, which does not divide 6 experts .* 2, 3, 6"),
        ({"tensor_parallel_size": 2}, "this version does not support both"),
        ({"pipeline_parallel_size": 2}, "this version does not support both"),
        ({"deterministic": True}, "leave out deterministic or enable_expert_parallel"),
        ({"data_parallel_size": 0}, "data_parallel_size is 0"),
        ({"data_parallel_size": 1}, "set one of them to 2 or more"),
    ],
)
def test_what_does_not_go_with_copies_is_refused(folder, more, said):
    with pytest.raises((ConfigError, UnsupportedFeatureError), match=said):
        open_copies(folder, **more)
