"""Decode steps as recorded graphs, without a GPU: a recording here is the function itself, called
again on the same tensors. So everything but CUDA is real: which size is taken, what the padding
holds, which rows are old, and that no token comes from the host.
"""

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams, ops
from minillm.api.arguments import EngineArgs
from minillm.api.outputs import RequestOutput
from minillm.execution.graphs import CudaCapture, DecodeGraphs, bucket_of, bucket_sizes
from minillm.execution.setup import records
from minillm.layers.kv_cache import KVCache
from minillm.models.presets import preset
from minillm.ops.dispatch import Backend
from minillm.plan.cost import memory_plan
from tests.engine.small import assert_idle, limit_steps, make, num_ahead, reasons, tokens
from tests.matrix.cells import Again, give_graphs, poison

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


def test_which_engine_gets_graphs(monkeypatch):
    """One on a GPU with our kernels, unless it is asked not to or is deterministic."""
    gpu, cpu = torch.device("cuda:1"), torch.device("cpu")
    args, backend = EngineArgs("tiny"), Backend("triton", "")
    monkeypatch.setattr(ops, "backend_of", lambda device: backend)
    assert records(args, gpu)
    assert not records(replace(args, enforce_eager=True), gpu)
    assert not records(replace(args, deterministic=True), gpu)
    backend = Backend("reference", "")
    assert not records(args, gpu)
    backend = Backend("cpu", "")
    assert not records(args, cpu)


def test_the_plan_keeps_memory_for_graphs():
    config = preset("llama-3.1-8b")
    with_graphs, without = (memory_plan(config, 80 * 2**30, cuda_graphs=on) for on in (True, False))
    assert without.graph_bytes == 0
    assert with_graphs.graph_bytes > 256 * config.hidden_size * 2
    assert with_graphs.activation_bytes == without.activation_bytes + with_graphs.graph_bytes
    assert with_graphs.kv_cache_bytes == without.kv_cache_bytes - with_graphs.graph_bytes


# ---- an engine with recordings that are functions ------------------------------------------------


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


def test_a_prompt_may_come_token_by_token(folder, expected):
    """Each is on the host, also behind one that was replayed."""
    llm = make(folder, long_prefill_token_threshold=1)
    again = give_graphs(llm)
    assert list(map(tokens, run(llm))) == expected
    assert again.replays == len(llm.trace)


def test_which_graph_is_replayed(folder, expected, monkeypatch):
    llm = make(folder, max_num_seqs=3, max_num_batched_tokens=16, num_gpu_blocks_override=20)
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
        assert record.why_eager == "several tokens of a sequence" or record.graph_rows
        assert bool(record.graph_rows) != bool(record.why_eager)
        if record.graph_rows:
            assert all(row.num_tokens == 1 for row in record.rows)
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


def test_a_row_that_sits_out_a_step_keeps_its_token(folder):
    """Its row is padding there, whose hidden states nobody reads."""
    llm = decoding(folder)
    engine = llm.engine
    plan = engine.scheduler.schedule()
    _, left_out, _ = plan.rows
    others = [row for row in plan.rows if row is not left_out]
    place = engine.runner._rows[left_out.seq_id].row
    before = int(engine.runner.rows.last[place])
    ours = engine.runner.execute(replace(plan, rows=others)).token_ids
    assert before == int(engine.runner.rows.last[place])
    theirs = engine.runner.execute(replace(plan, rows=[left_out], new=[], dropped=[])).token_ids
    engine.scheduler.commit(plan, ours | theirs)
    right = make(folder)
    for index, seq_id in enumerate(sorted(ours | theirs)):
        want = right.generate(PROMPTS[index], params_of(index, max_tokens=40), use_tqdm=False)
        have = engine.scheduler.sequences[seq_id].token_ids[len(PROMPTS[index]) :]
        assert have == want[0].outputs[0].token_ids[: len(have)]
        assert len(have) == 5


# ---- what one request asks of its tokens -------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "chosen logprob": {"logprobs": 0},
    "prompt logprobs": {"prompt_logprobs": 1},
    "repetition": {"repetition_penalty": 1.05},
    "presence": {"presence_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.5},
    "bias": {"logit_bias": {5: 3.0}},
    "min tokens": {"min_tokens": 9, "ignore_eos": False},
    "bad words": {"bad_words": ["a", "bc", "def"]},
    "allowed": {"allowed_token_ids": list(range(0, 250, 3))},
    "top-k": {"temperature": 0.8, "seed": 3, "top_k": 4},
    "top-p": {"temperature": 0.8, "seed": 3, "top_p": 0.7},
    "min-p": {"temperature": 0.8, "seed": 3, "min_p": 0.1},
    "stop string": {"stop": ["~~~~"]},
    "three completions": {"n": 3, "temperature": 0.9, "seed": 4},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_of_one_request_takes_the_graph_from_seven_others(folder, option):
    """Nor the launch ahead of the tokens: eight requests, one of which asks for something."""
    prompts = [[20 + i, 30 + i, 40 + i] for i in range(8)]

    def run_eight(llm: LLM) -> tuple[Any, int, int]:
        params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 8
        params[3] = replace(params[3], **OPTIONS[option])
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts = [(tokens(output), [one.logprobs for one in output.outputs]) for output in outputs]
        return texts, sum(record.graph_rows > 0 for record in llm.trace), num_ahead(llm)

    room = {"enable_prefix_caching": False, "num_gpu_blocks_override": 200}
    room |= {"max_num_seqs": 12, "max_num_batched_tokens": 64}
    llm = make(folder, async_scheduling=True, **room)
    give_graphs(llm)
    poison(llm)
    have, graphs, ahead = run_eight(llm)
    want, _, _ = run_eight(make(folder, **room))
    if option not in ("logprobs", "chosen logprob"):
        assert have == want
    assert [each for each, _ in have] == [each for each, _ in want]
    # The prompt is one step, and each other token of a plain batch one more. Only completions that
    # part have to wait: for the step in which they do.
    extra = 1 if option == "three completions" else 0
    assert graphs == 39 + extra
    assert ahead >= 39 - extra


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


def test_a_prompt_that_fails_fails_alone_while_the_next_step_is_launched(
    folder, expected, monkeypatch
):
    """The step behind it has its row, whose token is nowhere."""
    llm = make(folder, async_scheduling=True)
    give_graphs(llm)
    runner = llm.engine.runner
    forward = runner._forward

    def fails(rows):
        if any(runner._rows[row.seq_id].token_ids[:1] == PROMPTS[1][:1] for row in rows):
            raise RuntimeError("no memory")
        return forward(rows)

    monkeypatch.setattr(runner, "_forward", fails)
    outputs = run(llm)
    assert [reasons(output) for output in outputs] == [
        {"error"} if i == 1 else {"length"} for i in range(9)
    ]
    assert [each for i, each in enumerate(map(tokens, outputs)) if i != 1] == [
        each for i, each in enumerate(expected) if i != 1
    ]
    assert_idle(llm.engine)


def test_a_size_that_cannot_be_recorded_has_no_graph_and_the_others_have(folder, expected, caplog):
    llm = make(folder, max_num_seqs=9)
    again, works, calls = Again(), Again().capture, []

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        calls.append(run)
        if len(calls) == 3:  # 9, 8, 4
            raise RuntimeError("out of memory")
        return works(run)

    again.capture = capture  # type: ignore[method-assign]
    give_graphs(llm, again)
    poison(llm)
    assert llm.engine.runner.graphs.sizes == (1, 2, 8, 9)
    assert caplog.text.count("Capturing a CUDA graph of 4 rows failed") == 1
    assert llm.engine.runner.graphs.missing == "no graph: RuntimeError: out of memory"
    assert list(map(tokens, run(llm))) == expected
    whys = {record.why_eager for record in llm.trace if not record.graph_rows}
    assert whys == {"several tokens of a sequence"}
    assert {record.graph_rows for record in llm.trace if record.graph_rows} <= {1, 2, 8, 9}
    assert_idle(llm.engine)


def test_all_sizes_are_recorded_before_anything_runs(folder, expected):
    llm = make(folder, max_num_seqs=9)
    again = give_graphs(llm)
    graphs = llm.engine.runner.graphs
    assert graphs.sizes == bucket_sizes(9)
    assert list(graphs._replay) == sorted(graphs.sizes, reverse=True)
    assert graphs.num_bytes > again.num_bytes == 1000 * len(graphs.sizes)
    poison(llm)
    assert list(map(tokens, run(llm))) == expected
    assert again.replays


@pytest.mark.parametrize("limit", [{"max_seconds": -1.0}, {"max_bytes": 1}])
def test_recording_ends_where_time_or_memory_do(folder, expected, caplog, limit):
    llm = make(folder, max_num_seqs=9)
    runner = llm.engine.runner
    give_graphs(llm)
    graphs = runner.graphs = DecodeGraphs(runner.model, runner.kv, runner.rows, Again())
    graphs.record_all(**limit)
    assert graphs.sizes == ()
    assert "smaller batches are padded" in caplog.text
    poison(llm)
    assert list(map(tokens, run(llm))) == expected


def decoding(folder: Path) -> LLM:
    """An engine with three sequences that decode, and their graph is recorded."""
    llm = make(folder)
    give_graphs(llm)
    for index in range(3):
        params = params_of(index, max_tokens=40)
        llm.engine.add(llm.engine.make_request(str(index), None, PROMPTS[index], params))
    for _ in range(4):
        llm.engine.step()
    return llm


# ---- capture on a GPU, without one -------------------------------------------------------------


class FakeStreams:
    """In the place of torch.cuda: streams are names, and a capture that fails leaves its own."""

    def __init__(self, monkeypatch):
        self.current, self.made, self.used = "usual", [], []
        cuda = torch.cuda
        for name, value in {
            "graph_pool_handle": lambda: (0, 1), "Stream": self.stream,
            "CUDAGraph": SimpleNamespace,
            "current_stream": lambda device: self.current, "stream": self.inside,
            "graph": self.graph, "set_stream": lambda stream: setattr(self, "current", stream),
            "memory_reserved": lambda device: 0, "empty_cache": lambda: None,
            "synchronize": lambda device: None,
        }.items():  # fmt: skip
            monkeypatch.setattr(cuda, name, value)

    def stream(self, device):
        self.made.append(SimpleNamespace(wait_stream=lambda other: None))
        return self.made[-1]

    @contextmanager
    def inside(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        graph.replay, self.current = lambda: None, stream
        self.used.append(stream)
        yield  # an error leaves here, as in torch, where `capture_end` raises first
        self.current = "usual"


def test_one_side_stream_for_all_sizes_and_the_usual_one_after_a_failure(monkeypatch):
    """cuBLAS keeps a workspace for each stream that it was ever called on."""
    cuda = FakeStreams(monkeypatch)
    cuda.current = SimpleNamespace(wait_stream=lambda other: None)
    usual = cuda.current
    capture = CudaCapture(torch.device("cuda:0"))

    def run():
        if len(cuda.used) == 3:
            raise RuntimeError("operation not permitted when stream is capturing")

    for _ in range(2):
        capture.capture(run)
        cuda.current = usual
    with pytest.raises(RuntimeError, match="not permitted"):
        capture.capture(run)
    assert cuda.current is usual
    assert len(cuda.made) == 1
    assert cuda.used == cuda.made * 3


def test_inputs_of_a_graph_of_one_row_are_contiguous():
    """Kernels read slots one after another; a row's column of the inputs has the width of all."""
    llm = make("tiny", max_num_seqs=4)
    runner, seen = llm.engine.runner, []
    graphs = DecodeGraphs(runner.model, runner.kv, runner.rows, Again(), query_len=4)
    graphs.model = lambda batch, kv: seen.append(batch) or torch.zeros(len(batch.input_ids), 1)
    for size in (1, 2):
        graphs._run(size)
    for batch in seen:
        assert batch.slot_mapping.is_contiguous()
        assert batch.positions.is_contiguous()


def test_a_draft_model_has_graphs_of_its_own():
    """For every draft but the first, which may have more tokens to compute."""
    config = {"model": "tiny-draft", "num_speculative_tokens": 3}
    found, replays = [], []
    for graphs in (False, True):
        llm = make("tiny", max_num_seqs=4, speculative_config=config)
        if graphs:
            give_graphs(llm, num_drafts=3)
            proposer = llm.engine.runner.speculator.proposer
            replay = proposer.replay
            proposer.replay = lambda *given, replay=replay: replays.append(given) or replay(*given)
        params = [SamplingParams(temperature=0.8, seed=i, max_tokens=12) for i in range(3)]
        outputs = llm.generate(["def f(", "import ", "x"], params, use_tqdm=False)
        found.append([tokens(output) for output in outputs])
    assert found[0] == found[1]
    assert len(replays) > 5
