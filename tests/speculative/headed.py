"""Random Medusa heads for any model, and an engine whose every draft is computed again."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM
from minillm.models.checkpoint import open_model
from minillm.models.forward_pass import Chunk
from minillm.speculative.heads import base_hash
from minillm.speculative.medusa import Medusa
from tests.engine.small import make
from tests.sampling.sampling_rows import SamplingRow, sample

COUNT, WIDTH = 4, 24


def write_heads(model: Path, folder: Path, width: int = WIDTH, **fields: Any) -> Path:
    """Heads that say something, each something else; `fields` of heads.json are replaced."""
    source, dice = open_model(model), torch.Generator().manual_seed(0)
    size, tensors = source.config.hidden_size, {}
    for i in range(COUNT):
        tensors[f"heads.{i}.skip"] = torch.eye(size)
        tensors[f"heads.{i}.up"] = torch.randn(width, size, generator=dice)
        tensors[f"heads.{i}.down"] = torch.randn(size, width, generator=dice) * 0.1 * i
    folder.mkdir(exist_ok=True)
    named = {f"{name}.weight": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    card = {"method": "medusa", "num_heads": COUNT, "width": width, "base_model": str(model),
            "base_hash": base_hash(source)} | fields  # fmt: skip
    (folder / "heads.json").write_text(json.dumps(card))
    return folder


def with_heads(model: Any, heads: Any, num_drafts: Any = COUNT, **arguments: Any) -> LLM:
    """An engine with small blocks and heads."""
    config = {"method": "medusa", "model": str(heads), "num_speculative_tokens": num_drafts}
    config |= arguments.pop("config", {})
    return make(model, speculative_config=config, **({"max_model_len": 128} | arguments))


def medusa_of(llm: LLM) -> Medusa:
    """The proposer, which must not have failed."""
    proposer = llm.engine.runner.speculator.proposer
    assert isinstance(proposer, Medusa)
    return proposer


def formula(heads: Path, head: int, hidden: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Logits [V] of one head in float64."""
    tensors = load_file(heads / "model.safetensors")
    skip, up, down = (
        tensors[f"heads.{head}.{name}.weight"].double().numpy() for name in ("skip", "up", "down")
    )
    inner = up @ hidden
    return output @ (skip @ hidden + down @ (inner / (1 + np.exp(-inner))))


class Watch:
    """Compares every draft of an engine with the best token of the `logits` of a formula."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch):
        self.llm, self.wrong, self.total = llm, [], 0
        self.proposer = llm.engine.runner.speculator.proposer
        propose = self.proposer.propose

        def watched(rows: Any) -> Any:
            answers = propose(rows)
            for row, draft in zip(rows, answers, strict=True):
                self.check(row, list(draft.token_ids))
            return answers

        monkeypatch.setattr(self.proposer, "propose", watched)

    def logits(self, ids: list[int], drafts: list[int]) -> Iterable[np.ndarray]:
        """[V] for each draft after `ids`, given the drafts before it."""
        raise NotImplementedError

    def check(self, row: Any, found: list[int]) -> None:
        ids = list(row.token_ids)
        for i, logits in enumerate(self.logits(ids, found)):
            drawn = row.new.params, row.new.seed, row.new.sample_index
            chosen = SamplingRow(*drawn, position=len(ids) + i)
            expected = sample(torch.tensor(logits).float()[None], [chosen]).token_ids[0]
            self.total += 1
            if found[i] != expected:
                self.wrong.append((ids, i, found[i], expected))

    def assert_right(self, least: int) -> None:
        """Drafts are those of the formula, but for near ties; the proposer has not failed."""
        assert self.llm.engine.runner.speculator.proposer is self.proposer
        assert self.total >= least
        assert len(self.wrong) <= self.total / 200, self.wrong[:3]


class HeadWatch(Watch):
    """The formula of heads, from hidden states of a pass over the text."""

    def __init__(self, llm: LLM, heads: Path, monkeypatch: pytest.MonkeyPatch):
        super().__init__(llm, monkeypatch)
        self.heads = heads
        medusa_of(llm).features.states.fill_(torch.nan)
        tensors = load_file(llm.engine.source.folder / "model.safetensors")
        tied = llm.engine.source.config.tie_word_embeddings
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        self.output = tensors[name].double().numpy()

    def check(self, row: Any, found: list[int]) -> None:
        assert len(found) == min(row.num_drafts, COUNT)
        super().check(row, found)

    def logits(self, ids: list[int], drafts: list[int]) -> Iterable[np.ndarray]:
        forward = self.llm.engine.forward_pass
        alone, _ = forward.run([Chunk(0, 0, ids[:-1])], forward.allocate(1, len(ids)))
        hidden = alone[-1].double().numpy()
        return [formula(self.heads, i, hidden, self.output) for i in range(len(drafts))]
