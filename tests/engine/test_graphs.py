"""Decode steps as recorded graphs, without a GPU: a recording here is the function itself, called
again on the same tensors. So everything but CUDA is real: which size is taken, what the padding
holds, which rows are old, and that no token comes from the host.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams, ops
from minillm.graphs import bucket_of, bucket_sizes, capture_for
from minillm.layers.kv_cache import KVCache
from minillm.ops.dispatch import Backend
from minillm.outputs import RequestOutput
from tests.engine.small import assert_idle, limit_steps, make, reasons, tokens, write_model

# ---- sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [*range(1, 70), 100, 256, 1000])
def test_every_number_of_rows_has_a_size(most):
    sizes = bucket_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        size = bucket_of(sizes, rows)
        assert size >= rows
        assert not [other for other in sizes if rows <= other < size]


def test_how_many_rows_are_padding():
    sizes = bucket_sizes(256)
    assert sizes[:12] == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80)
    assert len(sizes) == 23
    padding = {rows: bucket_of(sizes, rows) - rows for rows in range(1, 257)}
    assert max(padding[rows] for rows in range(1, 9)) == 3
    assert max(padding[rows] for rows in range(9, 65)) == 7
    assert max(padding[rows] / bucket_of(sizes, rows) for rows in range(65, 257)) < 0.2
    assert sum(padding.values()) / sum(range(1, 257)) < 0.06


def test_who_gets_graphs(monkeypatch):
    """A GPU with our kernels, unless it is asked not to."""
    monkeypatch.setattr("minillm.graphs.CudaCapture", lambda device: f"graphs on {device}")
    gpu, cpu = torch.device("cuda:1"), torch.device("cpu")
    backend = Backend("triton", "")
    monkeypatch.setattr(ops, "backend_of", lambda device: backend)
    assert capture_for(gpu, enforce_eager=False) == "graphs on cuda:1"
    assert capture_for(gpu, enforce_eager=True) is None
    backend = Backend("reference", "")
    assert capture_for(gpu, enforce_eager=False) is None
    backend = Backend("cpu", "")
    assert capture_for(cpu, enforce_eager=False) is None


def test_more_rows_than_there_are():
    with pytest.raises(StopIteration):
        bucket_of(bucket_sizes(8), 9)


# ---- an engine with recordings that are functions ------------------------------------------------

POISON = 12345678


class Again:
    """Calls the function once when it is recorded, as a warm-up does, and then for each replay."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.sizes: list[int] = []
        self.replays = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.num_bytes += 1000

        def replay() -> None:
            self.replays += 1
            run()

        return replay


def give_graphs(llm: LLM) -> Again:
    """What a GPU does with padding, on this machine's reference operations."""
    runner, again = llm.engine.runner, Again()
    runner.use_graphs(again)
    runner.kv.mode = "plain"
    return again


def poison(llm: LLM) -> None:
    """Whatever nobody may read is a number that would show."""
    runner = llm.engine.runner
    runner.kv.key.fill_(math.nan)
    runner.kv.value.fill_(math.nan)
    runner.rows.tables.host.fill(POISON)
    runner.rows.last.fill_(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("byte-model"))


PROMPTS = [list(range(10 * i + 1, 10 * i + 4 + 2 * i)) for i in range(9)]


def params_of(index: int, **fields: Any) -> SamplingParams:
    """Every request differs: greedy, drawn, cut off, short and long."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.1, "seed": 6, "min_p": 0.02},
        {"temperature": 0.9, "seed": 7, "top_k": 20, "top_p": 0.9},
    ]
    chosen = kinds[index % len(kinds)] | {"max_tokens": 4 + 3 * index, "ignore_eos": True}
    return SamplingParams(**(chosen | fields))


def run(llm: LLM, prompts: Any = PROMPTS, **fields: Any) -> list[RequestOutput]:
    params = [params_of(index, **fields) for index in range(len(prompts))]
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    return list(map(tokens, run(make(folder))))


SETTINGS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "few seats": {"max_num_seqs": 3, "max_num_batched_tokens": 16},
    "chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    "recompute": {"num_gpu_blocks_override": 20},
    "swap": {"num_gpu_blocks_override": 20, "swap_space": 0.001},
    "radix": {"prefix_cache": "radix", "max_num_batched_tokens": 12, "max_num_seqs": 9},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_tokens_as_without(folder, expected, monkeypatch, setting):
    llm = make(folder, **SETTINGS[setting])
    limit_steps(llm, monkeypatch)
    again = give_graphs(llm)
    poison(llm)
    outputs = run(llm)
    assert list(map(tokens, outputs)) == expected
    assert {reason for output in outputs for reason in reasons(output)} == {"length"}
    assert_idle(llm.engine)
    replayed = [record for record in llm.trace if record.graph_rows]
    assert again.replays == len(replayed) > 10
    for record in llm.trace:
        assert bool(record.graph_rows) != bool(record.why_eager)
        if record.graph_rows:
            assert all(row.num_tokens == row.num_samples == 1 for row in record.rows)
            sizes = llm.engine.runner.graphs.sizes
            held = record.num_running + len(record.preempted)  # whose rows the next plan drops
            least = bucket_of(sizes, len(record.rows))
            assert least <= record.graph_rows <= bucket_of(sizes, held)
    assert {record.graph_rows for record in replayed} >= {1, 2}


def test_rows_move_together_when_others_end(folder, expected, monkeypatch):
    """Else a graph for nine rows would run where only the last one is left."""
    llm = make(folder)
    give_graphs(llm)
    poison(llm)
    moves = []
    move = llm.engine.runner.rows.move
    monkeypatch.setattr(
        llm.engine.runner.rows, "move", lambda *rows: (moves.append(rows), move(*rows))
    )
    assert list(map(tokens, run(llm))) == expected
    assert moves
    assert llm.trace[-1].graph_rows == 1


def test_forks_and_their_seeds(folder):
    plain, llm = make(folder), make(folder)
    give_graphs(llm)
    poison(llm)
    params = SamplingParams(n=3, temperature=0.9, seed=11, max_tokens=9, ignore_eos=True)
    for prompts in (PROMPTS[:4], [[77]]):  # whose first row is one token, with three samples
        have, want = (each.generate(prompts, params, use_tqdm=False) for each in (llm, plain))
        assert list(map(tokens, have)) == list(map(tokens, want))
    assert any(record.graph_rows for record in llm.trace)
    assert_idle(llm.engine)


def test_a_row_that_sits_out_a_step_keeps_its_token(folder):
    """Its row is padding there, and what padding chooses means nothing."""
    llm = decoding(folder)
    engine = llm.engine
    plan = engine.scheduler.schedule()
    _, left_out, _ = plan.rows
    others = [row for row in plan.rows if row is not left_out]
    place = engine.runner._rows[left_out.seq_id].row
    before = int(engine.runner.rows.last[place])
    ours = engine.runner.execute(replace(plan, rows=others)).token_ids
    assert before != int(engine.runner.rows.last[place])
    theirs = engine.runner.execute(replace(plan, rows=[left_out], new=[], dropped=[])).token_ids
    engine.scheduler.commit(plan, ours | theirs)
    right = make(folder)
    for index, seq_id in enumerate(sorted(ours | theirs)):
        want = right.generate(PROMPTS[index], params_of(index, max_tokens=40), use_tqdm=False)
        have = engine.scheduler.sequences[seq_id].token_ids[len(PROMPTS[index]) :]
        assert have == want[0].outputs[0].token_ids[: len(have)]
        assert len(have) == 5


WHY = {
    "logprobs": {"logprobs": 2},
    "masks, biases or penalties": {"presence_penalty": 0.5},
}


@pytest.mark.parametrize("why", WHY)
def test_what_runs_without_a_graph_says_why(folder, why):
    plain, llm = make(folder), make(folder)
    again = give_graphs(llm)
    have, want = run(llm, **WHY[why]), run(plain, **WHY[why])
    assert list(map(tokens, have)) == list(map(tokens, want))
    assert again.replays == 0
    assert {record.why_eager for record in llm.trace} == {why, "several tokens of a sequence"}


def test_min_tokens_is_a_mask_for_a_while(folder):
    plain, llm = make(folder), make(folder)
    again = give_graphs(llm)
    have, want = run(llm, min_tokens=3), run(plain, min_tokens=3)
    assert list(map(tokens, have)) == list(map(tokens, want))
    whys = [record.why_eager for record in llm.trace]
    assert whys[1:3] == ["masks, biases or penalties"] * 2
    assert not any(whys[3:])
    assert again.replays == len(whys) - 3


def test_a_sequence_that_comes_back_from_an_eager_step(folder, expected):
    """Prompts arrive while others decode: tokens of eager steps reach the next graph."""
    llm = make(folder)
    give_graphs(llm)
    poison(llm)
    engine, lives = llm.engine, []
    for index, prompt in enumerate(PROMPTS):
        request = engine.make_request(str(index), None, prompt, params_of(index))
        lives.append(engine.add(request))
        engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    assert [tokens(live.output()) for live in lives] == expected
    kinds = [bool(record.graph_rows) for record in llm.trace]
    assert kinds[:8] == [False, True] * 4


def test_nan_fails_its_own_row(folder, monkeypatch):
    llm = make(folder)
    again = give_graphs(llm)
    runner = llm.engine.runner
    works = runner.model.layers[1].forward

    def forward(x: Any, residual: Any, rope: Any, batch: Any, kv: KVCache) -> Any:
        x, residual = works(x, residual, rope, batch, kv)
        wrong = (batch.positions == 12) & (batch.slot_mapping >= 0)
        return torch.where(wrong[:, None], math.nan, x), residual

    want = list(map(tokens, run(make(folder))))
    monkeypatch.setattr(runner.model.layers[1], "forward", forward)
    outputs = run(llm)
    assert again.replays
    failed = 0
    for output, right in zip(outputs, want, strict=True):
        (completion,) = output.outputs
        if completion.finish_reason == "error":
            failed += 1
            assert "NaN" in completion.error
            assert completion.token_ids == right[0][: len(completion.token_ids)]
        else:
            assert [completion.token_ids] == right
    assert 0 < failed < len(PROMPTS)
    assert_idle(llm.engine)


def test_a_recording_that_fails_is_told_once_and_served_without(folder, expected, caplog):
    llm = make(folder)
    again = give_graphs(llm)

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    again.capture = capture  # type: ignore[method-assign]
    assert list(map(tokens, run(llm))) == expected
    assert caplog.text.count("without CUDA graphs") == 1
    whys = {record.why_eager for record in llm.trace}
    assert any("not permitted" in why for why in whys)
    assert_idle(llm.engine)


def test_all_sizes_can_be_recorded_before_anything_runs(folder, expected):
    llm = make(folder, max_num_seqs=9)
    again = give_graphs(llm)
    graphs, seen = llm.engine.runner.graphs, []
    poison(llm)
    graphs.record_all(seen.append)
    assert seen == sorted(graphs.sizes, reverse=True)
    assert graphs.num_bytes == 1000 * len(graphs.sizes)
    assert list(map(tokens, run(llm))) == expected
    assert again.replays


# ---- no waiting for the device -----------------------------------------------------------------

WAITS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)


class Waits:
    """Counts what would make a host wait for a GPU, outside of the operations that are kernels
    there."""

    def __init__(self, patch: pytest.MonkeyPatch, llm: LLM):
        self.seen: list[str] = []
        self.paused = 0
        for name in WAITS:
            self.watch(patch, name)
        for name in ("norm_rope_write", "paged_attention"):
            patch.setattr(ops, name, self.pausing(getattr(ops, name)))

    def watch(self, patch: pytest.MonkeyPatch, name: str) -> None:
        works = getattr(torch.Tensor, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            if not self.paused:
                self.seen.append(name)
            return works(*arguments, **named)

        patch.setattr(torch.Tensor, name, watched)

    def pausing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*arguments: Any) -> Any:
            self.paused += 1
            try:
                return function(*arguments)
            finally:
                self.paused -= 1

        return paused


def decoding(folder: Path) -> LLM:
    """In the middle of its work: three sequences that decode, and their graph is recorded."""
    llm = make(folder)
    give_graphs(llm)
    for index in range(3):
        params = params_of(index, max_tokens=40)
        llm.engine.add(llm.engine.make_request(str(index), None, PROMPTS[index], params))
    for _ in range(4):
        llm.engine.step()
    return llm


def test_a_decode_step_waits_for_nothing_before_its_tokens(folder, monkeypatch):
    llm = decoding(folder)
    runner, scheduler = llm.engine.runner, llm.engine.scheduler
    plan = scheduler.schedule()
    with monkeypatch.context() as patch:
        waits = Waits(patch, llm)
        flight = runner.launch(plan)
    assert flight.result.graph_rows == 4
    assert waits.seen == []
    assert flight.result.token_ids == {}
    scheduler.commit(plan, flight.collect().token_ids)


@pytest.mark.parametrize("planted", ["item", "nonzero", "bool mask"])
def test_a_wait_would_be_found(folder, monkeypatch, planted):
    llm = decoding(folder)
    runner = llm.engine.runner
    works = runner.sampler.bring_up_to_date

    def waiting() -> None:
        works()
        if planted == "item":
            runner.rows.last.max().item()
        elif planted == "nonzero":
            runner.rows.last.nonzero()
        elif bool((runner.rows.last > 0).all()):
            return

    monkeypatch.setattr(runner.sampler, "bring_up_to_date", waiting)
    with monkeypatch.context() as patch:
        waits = Waits(patch, llm)
        runner.launch(llm.engine.scheduler.schedule())
    assert waits.seen
