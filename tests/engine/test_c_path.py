"""The engine on the C functions: requests that are cut, cached, preempted and run together get what
they get alone. The models are small, but their heads are whole vectors, so that C takes them."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from minillm import LLM
from minillm.forward_pass import Chunk
from minillm.models.all_layers import AllLayers
from minillm.ops import cpu
from tests.engine.families import (
    BLOCK,
    LONGEST,
    SEATS,
    SECOND_ONLY,
    Cell,
    Reference,
    generate,
    jobs_of,
    run_cell,
)
from tests.engine.test_equality import positions_of_a_chunk_begin_at_zero
from tests.models.tiny import Tiny

BF16 = torch.bfloat16
MODELS = {
    "llama": Tiny("llama", {"num_hidden_layers": 2}),
    "mistral": Tiny("mistral", {"num_hidden_layers": 2}, seed=3),
    "qwen3": Tiny("qwen3", {"num_hidden_layers": 2, "head_dim": 32}, seed=4),
}
CELLS = [Cell(7, "hash", "recompute", 1), Cell(0, "radix", "swap", 3), Cell(1, "off", "ample", 1)]
TOLERANCE = 0.15  # of a log-probability in bf16, whose logits here are up to about 10


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    return MODELS[request.param].write(tmp_path_factory.mktemp("c_path")).folder


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often the C functions, and all layers at once, did the work."""
    count: Counter[str] = Counter()
    for name in ("norm_rope_write", "paged_attention", "rms_norm", "silu_mul"):
        inner = getattr(cpu, name)

        def counted(*arguments, name=name, inner=inner):
            count[name] += 1
            return inner(*arguments)

        monkeypatch.setattr(cpu, name, counted)
    run = AllLayers.__call__

    def watched(self, *arguments):
        result = run(self, *arguments)
        count["all layers"] += result is not None
        count["stepped aside"] += result is None
        return result

    monkeypatch.setattr(AllLayers, "__call__", watched)
    return count


@pytest.mark.skipif(cpu.functions(torch.float32) is None, reason="no C library")
def test_float32_tokens_are_those_that_a_request_gets_alone(folder, calls):
    for n in (1, 3):
        reference = Reference(folder, n)
        for cell in CELLS:
            if cell.n != n:
                continue
            before = calls.total()
            found, excused = reference.differences(run_cell(cell, folder))
            assert not found
            assert len(excused) <= 1
            assert calls.total() > before
    assert all(calls[name] > 100 for name in ("norm_rope_write", "paged_attention", "silu_mul"))


@pytest.mark.skipif(
    not cpu.takes_panels(torch.zeros(32, 32, dtype=BF16)), reason="a processor without AMX"
)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_bf16_tokens_are_as_likely_as_the_whole_sequence_says(folder, cell, calls):
    """Every token of a run against one pass over its whole sequence, in pages of its own."""
    with open_bf16(folder, cell) as llm:
        jobs = [
            replace(job, params=replace(job.params, logprobs=1))
            for job in jobs_of(llm, cell.n)[:SECOND_ONLY]
        ]
        outputs = generate(llm, jobs)
        counters = llm.engine.scheduler.counters
        assert counters.num_mixed_steps > 0
        preempted = counters.num_preemptions_recompute + counters.num_preemptions_swap
        assert (preempted > 0) == (cell.pool != "ample")
    assert calls["all layers"] > 20
    assert calls["stepped aside"] == 0
    assert calls["paged_attention"] == 0
    with open_bf16(folder, Cell(0, "off", "ample", 1)) as llm:
        forward = llm.engine.forward_pass
        worst = 0.0
        for job, output in zip(jobs, outputs, strict=True):
            for completion in output.outputs:
                ids = [*job.ids, *completion.token_ids]
                hidden, _ = forward.run([Chunk(0, 0, ids)], forward.allocate(1, len(ids)))
                logits = forward.logits(hidden[len(job.ids) - 1 : -1]).float()
                expected = logits.log_softmax(-1)
                for step, token in enumerate(completion.token_ids):
                    given = completion.logprobs[step][token].logprob
                    worst = max(worst, abs(given - expected[step, token].item()))

        assert worst < TOLERANCE, f"worst: {worst}"


@pytest.mark.skipif(
    not cpu.takes_panels(torch.zeros(32, 32, dtype=BF16)), reason="a processor without AMX"
)
def test_a_planted_bug_shows_in_bf16(folder, calls, monkeypatch):
    positions_of_a_chunk_begin_at_zero(monkeypatch)
    with pytest.raises(AssertionError, match="worst"):
        test_bf16_tokens_are_as_likely_as_the_whole_sequence_says(folder, CELLS[0], calls)


def open_bf16(folder, cell: Cell) -> LLM:
    """The engine of a cell, in bf16."""
    cache = (
        {"enable_prefix_caching": False} if cell.cache == "off" else {"prefix_cache": cell.cache}
    )
    return LLM(
        folder,
        dtype="bfloat16",
        block_size=BLOCK,
        max_model_len=LONGEST,
        max_num_seqs=SEATS,
        num_gpu_blocks_override=cell.num_blocks,
        long_prefill_token_threshold=cell.chunk,
        swap_space=2**-7 if cell.pool == "swap" else 0,
        **cache,
    )
