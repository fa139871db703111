"""A tiny random model with one token per byte, and what must hold when its engine is idle."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from minillm import LLM
from minillm.api.outputs import RequestOutput
from minillm.engine.loop import Engine
from minillm.scheduling.data_parallel import schedulers_of
from tests.scheduling.invariants import check_invariants

EOS = 256
BLOCK_SIZE = 4
MAX_STEPS = 600  # far more than any test needs, far less than for ever


def write_model(folder: Path) -> Path:
    """A checkpoint of two layers, whose every id has text."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.15,
        max_position_embeddings=128,
        eos_token_id=EOS,
    )
    Qwen3ForCausalLM(config).eval().save_pretrained(folder)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({char: i for i, char in enumerate(sorted(alphabet))}, [])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


def make(folder: str | Path, **arguments: Any) -> LLM:
    """An engine with small blocks, so that short prompts have several."""
    defaults = {"dtype": "float32", "block_size": BLOCK_SIZE, "num_gpu_blocks_override": 64}
    return LLM(folder, **(defaults | {"max_model_len": 64} | arguments))


def limit_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch, most: int = MAX_STEPS) -> None:
    """A hang becomes a failed test."""
    step, left = llm.engine.step, [most]

    def limited() -> list:
        left[0] -= 1
        assert left[0] > 0, "the engine does not come to an end"
        return step()

    monkeypatch.setattr(llm.engine, "step", limited)


def assert_idle(engine: Engine) -> None:
    """Nothing is left of any request: no sequence, no block, and no row beyond those that the next
    plan will drop."""
    assert not engine.has_work
    runners = getattr(engine.runner, "runners", [engine.runner])  # ranks that are threads
    schedulers = schedulers_of(engine.scheduler)
    for place, scheduler in enumerate(schedulers):
        check_invariants(scheduler)
        assert not scheduler.has_work
        assert not scheduler.in_flight
        assert scheduler.num_seqs == 0
        blocks = scheduler.blocks
        assert blocks.pool.num_free == blocks.pool.num_blocks
        assert blocks.host.num_free == blocks.host.num_blocks
        for each in runners[place :: len(schedulers)] if len(schedulers) > 1 else runners:
            assert sorted(each._rows) == sorted(scheduler._dropped)
            rows = [state.row for state in each._rows.values()]
            assert sorted([*rows, *each._free_rows]) == list(range(scheduler.config.max_num_seqs))


def num_ahead(llm: LLM) -> int:
    """Steps that were planned before the tokens of the one before were there."""
    return sum(record.planned < before.computed for before, record in itertools.pairwise(llm.trace))


def tokens(output: RequestOutput) -> list[list[int]]:
    """The token ids of every completion."""
    return [list(completion.token_ids) for completion in output.outputs]


def reasons(output: RequestOutput) -> set[str | None]:
    """How the completions ended."""
    return {completion.finish_reason for completion in output.outputs}
