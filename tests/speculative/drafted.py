"""An engine whose draft model is watched: what its cache has marked as right is computed anew."""

from typing import Any

import pytest
import torch

from minillm import LLM
from minillm.models.forward_pass import Chunk, ForwardPass
from minillm.scheduling.request import Sequence
from minillm.speculative.draft_model import DraftModel
from tests.engine.small import make

K = 4


def with_draft(model: Any, draft: Any, num_drafts: Any = K, **arguments: Any) -> LLM:
    """An engine with small blocks and a draft model."""
    config = {"model": str(draft), "num_speculative_tokens": num_drafts}
    config |= arguments.pop("config", {})
    return make(model, speculative_config=config, **({"max_model_len": 128} | arguments))


def draft_of(llm: LLM) -> DraftModel:
    """The draft model, which must not have failed."""
    proposer = llm.engine.runner.speculator.proposer
    assert isinstance(proposer, DraftModel)
    return proposer


def num_marked(llm: LLM, sequence: Sequence) -> int:
    """How many of the first positions of a sequence are marked, block by block."""
    shadow, total = draft_of(llm).shadow, 0
    for block in sequence.table.blocks:
        total += int(shadow.filled[block])
        if shadow.filled[block] < shadow.kv.block_size:
            break
    return total


def check_marks(llm: LLM) -> int:
    """Compare what is marked with a pass over the tokens; returns how many positions that were."""
    draft, total = draft_of(llm), 0
    for sequence in llm.engine.scheduler.running:
        count = min(num_marked(llm, sequence), sequence.num_committed)  # drafts lie behind them
        if not count:
            continue
        alone = ForwardPass(draft.model)
        expected = alone.allocate(1, count)
        alone.run([Chunk(0, 0, sequence.token_ids[:count])], expected)
        blocks = torch.tensor(sequence.table.blocks)
        for mine, theirs in zip(draft.shadow.kv.tensors, expected.tensors, strict=True):
            found = mine[:, blocks].transpose(1, 2).flatten(2, 3)[:, :, :count]
            torch.testing.assert_close(found, theirs[:, 0], atol=1e-4, rtol=1e-4)
        total += count
    return total


def watch(llm: LLM, monkeypatch: pytest.MonkeyPatch, most_steps: int = 5000) -> None:
    """Check marks after every step, and end what does not end. Nothing is right by chance: blocks
    that nothing was written to are not numbers."""
    for tensor in draft_of(llm).shadow.kv.tensors:
        tensor.fill_(torch.nan)
    step, left = llm.engine.step, [most_steps]

    def watched() -> list:
        left[0] -= 1
        assert left[0] > 0, "the engine does not come to an end"
        done = step()
        check_marks(llm)
        return done

    monkeypatch.setattr(llm.engine, "step", watched)


def assert_all_accepted(llm: LLM, least: int) -> None:
    """Every draft was the token that was sampled, and there were enough of them."""
    draft_of(llm)
    counters = llm.engine.scheduler.counters
    assert counters.num_accepted_tokens == counters.num_draft_tokens
    assert counters.num_draft_tokens >= least
