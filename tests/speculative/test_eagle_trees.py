"""Trees drafted by an EAGLE layer: every draft is that of the formula along its own path, also
after paths were accepted, and no token changes."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from minillm.errors import ConfigError
from minillm.execution import setup as execution_setup
from minillm.models import trees as token_trees
from minillm.models.trees import ROOT
from minillm.speculative import eagle_trees, heads
from minillm.speculative.proposer import Draft
from minillm.speculative.trees import grown
from tests.engine.small import make
from tests.matrix.cells import Cell, check, heads_of
from tests.pairs import some
from tests.planting import plant_everywhere
from tests.sampling.sampling_rows import SamplingRow, sample
from tests.speculative.eagled import EagleWatch, eagle_of, with_eagle, write_eagle
from tests.speculative.test_draft_model import LONG, SAMPLED, generate, params_of

PATHS = [[0], [1], [0, 0], [2], [1, 0], [0, 1], [0, 0, 0], [1, 0, 2], [0, 0, 0, 0]]
PROMPTS = [LONG[:9], LONG[20:21], LONG[40:60]]
TABLE = {"0": [[0.5, 0.2, 0.1], [0.4, 0.1, 0.1]]}


class TreeWatch(EagleWatch):
    """Compares each draft with the formula along its path. Half of what could be accepted is then
    put in the place of a draft: random layers are hardly ever right."""

    def __init__(self, llm: Any, layer: Path, monkeypatch: pytest.MonkeyPatch, known: Any = None):
        super().__init__(llm, layer, monkeypatch)
        self.known, self.dice = known, Random(0)
        drafted = type(self.proposer).propose.__get__(self.proposer)

        def watched(rows: Any) -> list[Draft]:
            answers = drafted(rows)
            for row, draft in zip(rows, answers, strict=True):
                self.check_tree(row, draft)
            return [self.helped(*each) for each in zip(rows, answers, strict=True)]

        monkeypatch.setattr(self.proposer, "propose", watched)

    def check_tree(self, row: Any, draft: Draft) -> None:
        """Best first, without the siblings before."""
        ids, found, parents = list(row.token_ids), list(draft.token_ids), list(draft.parents)
        assert parents == list(eagle_trees.tree_of(self.proposer.tree[: row.num_drafts]).parents)
        for parent in dict.fromkeys(parents):
            path, node = [], parent
            while node != ROOT:
                path.insert(0, found[node])
                node = parents[node]
            logits = torch.tensor(self.formula.logits(ids, [*path, 0])[-1]).float()
            drawn = row.new.params, row.new.seed, row.new.sample_index
            chosen = SamplingRow(*drawn, position=len(ids) + len(path))
            ranks = {p[-1]: i for i, p in enumerate(self.proposer.tree[: row.num_drafts])
                     if parents[i] == parent}  # fmt: skip
            for rank in range(1 + max(ranks)):
                expected = sample(logits[None], [chosen]).token_ids[0]
                logits[expected] = -torch.inf
                if rank in ranks:
                    self.total += 1
                    if found[ranks[rank]] != expected:
                        self.wrong.append((ids, ranks[rank], found[ranks[rank]], expected))

    def helped(self, row: Any, draft: Draft) -> Draft:
        if self.known is None:
            return draft
        tokens, right = list(draft.token_ids), {ROOT: 0}
        due = self.known[tuple(row.new.token_ids[: row.new.num_prompt_tokens])]
        due = due[len(row.token_ids) - row.new.num_prompt_tokens :]
        for i, parent in enumerate(draft.parents):
            depth = right.get(parent)
            siblings = [t for t, p in zip(tokens, draft.parents, strict=True) if p == parent]
            if depth is not None and depth < len(due):
                if due[depth] not in siblings and self.dice.random() < 0.5:
                    tokens[i] = due[depth]
                if tokens[i] == due[depth]:
                    right[i] = depth + 1
        return Draft(tokens, None, draft.parents)


@pytest.fixture
def layer(folder: Path, tmp_path: Path) -> Path:
    return write_eagle(folder, tmp_path / "layer")


@pytest.mark.parametrize("how", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_are_those_of_the_formula_along_their_paths(folder, layer, monkeypatch, how):
    """In a batch, with chunks of prompts beside it, after paths of every form were accepted."""
    params = params_of(24, **how)
    plain = generate(make(folder, max_model_len=128), PROMPTS, params)
    known = {tuple(prompt): found[0] for prompt, found in zip(PROMPTS, plain, strict=True)}
    llm = with_eagle(folder, layer, len(PATHS), config={"tree": PATHS})
    watch = TreeWatch(llm, layer, monkeypatch, known)
    assert generate(llm, PROMPTS, params) == plain
    assert llm.engine.scheduler.counters.num_accepted_tokens > 15
    watch.assert_right(least=150)


@pytest.mark.parametrize("how", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_a_tree_that_is_a_chain_drafts_what_a_chain_drafts(folder, layer, how):
    counts = []
    for config in ({}, {"tree": [[0] * i for i in range(1, 5)]}):
        llm = with_eagle(folder, layer, config=config)
        generate(llm, PROMPTS, params_of(60, **how))
        counters = llm.engine.scheduler.counters
        counts.append((counters.num_steps, counters.num_drafts, counters.num_accepted_at))
    assert counts[0] == counts[1]


CELLS = [
    Cell("bytes", chunk=7, cache="hash", pool="swap"),
    Cell("llama", "exact bfloat16", cache="radix", pool="recompute", kv="int8"),
    Cell("deepseek_v2", path="torch", chunk=7, cache="hash"),
]


@pytest.mark.parametrize("cell", some(CELLS[1:2], CELLS), ids=str)
def test_trees_of_a_layer_change_no_token(cell):
    """Greedy and sampled, alone and among others, with penalties, constraints and forks."""
    config = {"method": "eagle", "model": heads_of(cell.model, "eagle"), "tree": PATHS}
    counters = check(cell, config).engine.scheduler.counters
    assert counters.num_draft_tokens > 8 * counters.num_drafts / 2 > 0


@pytest.mark.slow
def test_a_tree_of_the_embedded_layer_yields_more_than_its_chain():
    yields = []
    for config in ({"tree": PATHS}, {"num_speculative_tokens": 4}):
        given = {"method": "eagle", "model": "tiny-eagle"} | config
        counters = check(Cell("embedded"), given).engine.scheduler.counters
        yields.append(counters.num_accepted_tokens / counters.num_drafts)
    assert yields[0] > 1.1 * yields[1]


def test_auto_grows_from_the_accuracies_and_beyond_them(folder, layer, tmp_path):
    """A draft behind the depths that were measured counts as the deepest of them."""
    layer = write_eagle(folder, tmp_path / "measured", rank_accuracy=TABLE)
    llm = with_eagle(folder, layer, "auto", config={"tree": "auto"})
    table = [*TABLE["0"], *[TABLE["0"][-1]] * 13]
    assert eagle_of(llm).tree == tuple(grown(table, 31))
    assert max(map(len, eagle_of(llm).tree)) > 2
    llm.engine.scheduler.drafts._due = 0  # tried at once
    generate(llm, PROMPTS, params_of(20, temperature=0.0))
    assert llm.engine.runner.speculator.proposer is not None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no accuracies": ({"tree": "auto"}, "no valid rank_accuracy in heads.json, .* train the heads"),
    "too deep": ({"tree": [[0] * i for i in range(1, 17)]}, "of 16 ranks and .* at most 15 tokens"),
    "typical": ({"tree": [[0]], "rejection_sample_method": "typical"}, "is verified 'strict'"),
}


def test_a_layer_that_drafts_in_parallel_takes_no_tree(folder, tmp_path):
    layer = write_eagle(folder, tmp_path / "masked", parallel=True)
    with pytest.raises(ConfigError, match="in parallel, as a chain; leave out 'tree'"):
        with_eagle(folder, layer, 1, config={"tree": [[0]]})


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tree_of_a_layer(folder, layer, name):
    given, message = REFUSED[name]
    config = {"method": "eagle", "model": str(layer)} | given
    with pytest.raises(ConfigError, match=message) as error:
        make(folder, speculative_config=config)
    assert "\n" not in str(error.value)


# ---- planted bugs ------------------------------------------------------------------------------

PATH, AUTO = "path", "auto"
LEVELS, NODES = eagle_trees, token_trees
BUGS = {
    "the state of the last token": (LEVELS, "states[above])", "states[roots][:1])", PATH),
    "children of another parent": (LEVELS, "best[ranks, column]", "best[ranks, column * 0]", PATH),
    "the best token for all": (LEVELS, "best[ranks, column]", "best[ranks * 0, column]", PATH),
    "the noise of the first draft": (LEVELS, "(level - 1)", "0 * level", PATH),
    "the noise of another row": (LEVELS, "in owner[nodes]]", "in owner[nodes][::-1]]", PATH),
    "roots of another row": (LEVELS, "+ first[owner]", "+ first[owner] * 0", PATH),
    "slots in order": (NODES, "tails=batch.tails and", "tails=None and", PATH),
    "a key too many": (NODES, "batch.seq_lens[nodes],", "batch.seq_lens[nodes] + 1,", PATH),
    "slots of other nodes": (NODES, "slot_mapping[nodes]", "slot_mapping[nodes.flip(0)]", PATH),
    "features stay where they were": (execution_setup, "*kv.tensors, *features.pages.tensors",
                                      "kv.tensors", PATH),
    "the last accuracy is not continued": (heads, "[table[-1]] * (most", "[[0.0]] * (most", AUTO),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, folder, layer, tmp_path, monkeypatch) -> None:
    module, right, wrong, finder = BUGS[bug]
    plant_everywhere(monkeypatch, module, right, wrong)
    find = {
        PATH: lambda: test_drafts_are_those_of_the_formula_along_their_paths(
            folder, layer, monkeypatch, SAMPLED),
        AUTO: lambda: test_auto_grows_from_the_accuracies_and_beyond_them(folder, layer, tmp_path),
    }[finder]  # fmt: skip
    with pytest.raises((AssertionError, pytest.fail.Exception, RuntimeError, ValueError)):
        find()
