"""Engines of models with experts and latent attention on the fast CPU path: chunks, prefix caches,
swapping, speculation and ranks give the tokens of plain torch. Weights are in panels on every
processor."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.models.all_layers import AllLayers
from minillm.ops import cpu
from tests.engine.families import BLOCK, LONGEST, Cell, Reference, run_cell
from tests.models.test_packed_parity import LATENT, MSCALE
from tests.models.tiny import Tiny

SHORT = {"num_hidden_layers": 2, "moe_intermediate_size": 64, "intermediate_size": 128}
MODELS = {
    "qwen3_moe": Tiny("qwen3_moe", SHORT | {"head_dim": 32, "num_experts": 8}, seed=2),
    "deepseek_v2": Tiny(
        "deepseek_v2", LATENT | SHORT | {"n_shared_experts": 2, "mlp_bias": True}, MSCALE, seed=1
    ),
}
CELLS = [Cell(7, "hash", "recompute", 1), Cell(0, "radix", "swap", 1), Cell(64, "off", "ample", 1)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
PROMPTS = [[5, 9, 5, 9, 5, 9, 5], list(range(3, 60)), [7] * 11, [100]]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """Checkpoints, written once."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = MODELS[name].write(tmp_path_factory.mktemp("sparse")).folder
        return written[name]

    return get


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """How often the call of all layers did the work, and how often it did not."""
    if cpu.functions(torch.float32) is None:
        pytest.skip(cpu.describe(torch.float32))
    monkeypatch.setenv(cpu.PANELS, "1")
    count: Counter[str] = Counter()
    run = AllLayers.__call__

    def watched(self, *arguments):
        result = run(self, *arguments)
        count["all layers" if result is not None else "stepped aside"] += 1
        return result

    monkeypatch.setattr(AllLayers, "__call__", watched)
    return count


@pytest.mark.parametrize("name", MODELS)
def test_requests_get_what_they_get_alone(name, folder_of, calls):
    """Chunked prefill, prefix caches, recomputation and swapping."""
    reference = Reference(folder_of(name), 1)
    for cell in CELLS:
        before = calls.total()
        found, excused = reference.differences(run_cell(cell, folder_of(name)))
        assert not found
        assert len(excused) <= 1
        assert calls.total() > before
    assert calls["stepped aside"] == 0


def tokens(folder: Path, **more: Any) -> list[list[int]]:
    """Greedy tokens of all prompts."""
    arguments = {"dtype": "float32", "block_size": BLOCK, "max_model_len": LONGEST}
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(folder, num_gpu_blocks_override=200, **arguments, **more) as llm:
        outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs]


RANKS = {"distributed_executor_backend": "threads", "tensor_parallel_size": 2}
WAYS = {
    "one call": ({}, True),
    "speculation": ({"speculative_config": NGRAM}, True),
    "two ranks, halves": (RANKS, True),
    "two stages": (
        {"distributed_executor_backend": "threads", "pipeline_parallel_size": 2}, None
    ),
    "ranks with whole experts": (RANKS | {"enable_expert_parallel": True}, False),
    "deterministic": ({"deterministic": True}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_plain_torch(name, folder_of, calls):
    """In every way to run them; `expected` says whether all layers run in one call."""
    plain = tokens(folder_of(name), enforce_eager=True)
    assert calls["all layers"] == 0
    for way, (arguments, expected) in WAYS.items():
        calls.clear()
        assert tokens(folder_of(name), **arguments) == plain, way
        assert expected is None or (calls["all layers"] > 0) == expected, way
