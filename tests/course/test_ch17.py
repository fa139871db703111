"""Chapter 17's own functions: passes over trees, random growth."""

import random

import torch

from minillm import LLM
from minillm.models.trees import Tree
from minillm.speculative.trees import grown, values
from minillm_exercises.chapters import ch17
from tests.speculative.treed import random_parents

PROMPT = [5, 6, 7, 8, 9]


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
