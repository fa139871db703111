"""Chapter 17's own functions: trees that are watched, passes over them, random growth."""

import random
from itertools import pairwise

import pytest
import torch

from minillm import LLM
from minillm.models.trees import Tree
from minillm.speculative.trees import grown, tree_of, values
from minillm_exercises.chapters import ch17
from tests.speculative.treed import random_parents

MEDUSA = {"method": "medusa", "model": "tiny-medusa"}
PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("config", [{"num_speculative_tokens": 3}, {"tree": [[0], [1], [0, 0]]}])
def test_watched_steps_make_up_the_text(config):
    plain = LLM("tiny", dtype="float32", device="cpu")
    watch = ch17.Watch(
        LLM("tiny", dtype="float32", device="cpu", speculative_config=MEDUSA | config)
    )
    wanted, _ = ch17.ch16.write(plain, PROMPT, max_tokens=20)
    for _ in range(2):  # each text has steps of its own
        tokens, steps = watch.write(PROMPT, max_tokens=20)
        assert tokens == wanted
        assert [step.known for step in steps] == [
            (*PROMPT, *tokens[: len(step.known) - len(PROMPT)]) for step in steps
        ]
        for step, after in pairwise(steps):
            new = [step.drafts[node - 1] for node in step.path[1:]] + [step.last]
            assert after.known == (*step.known, *new)
            assert step.tree.is_chain == ("tree" not in config)
        # The first token comes with the prompt, and the last may come from a step without drafts.
        assert sum(len(step.path) for step in steps) >= 20 - 2
        assert 0 < watch.seconds < 60


def test_a_pass_over_a_tree_is_passes_over_its_paths():
    passes, dice = ch17.Pass(LLM("tiny", dtype="float32", device="cpu"), PROMPT), random.Random(0)
    for _ in range(4):
        tree = Tree(tuple(random_parents(dice, 9)))
        tokens = [dice.randrange(4096) for _ in tree.depths]
        together, seen = passes.logits(tokens, tree), set()
        for path in ch17.paths_of(tree):
            alone = passes.logits([tokens[node] for node in path])
            torch.testing.assert_close(together[path], alone, atol=1e-3, rtol=0)
            assert path[-1] - 1 not in [p for p in tree.parents if p >= 0] or path == [0]
            seen.update(path)
        assert seen == {*range(10)}
    assert ch17.paths_of(Tree(())) == [[0]]


def test_trees_at_random_have_parents_and_siblings_before_and_no_tree_is_better_than_the_grown():
    table = ch17.accuracies("tiny-medusa", "0")
    assert [len(row) for row in table] == [10] * 4
    for seed in range(20):
        paths = ch17.random_paths(table, 40, seed)
        assert len({*paths}) == 40
        for at, path in enumerate(paths):
            before = paths[:at]
            assert len(path) == 1 or path[:-1] in before
            assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in before
        assert sum(values(paths, table)) < sum(values(grown(table, 40), table))
    assert len(ch17.random_paths([[0.5, 0.2]], 9, 0)) == 2


def test_rows_are_timed(monkeypatch):
    monkeypatch.setenv("MINILLM_QUICK", "1")
    llm = LLM("tiny", dtype="float32", device="cpu")
    found = ch17.row_seconds(llm, {1: None, 3: tree_of([(0,), (1,)])})
    assert found.keys() == {1, 3}
    assert min(found.values()) > 0
