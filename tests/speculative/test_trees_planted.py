"""Deliberate bugs of token trees, each with a test that finds it."""

from types import ModuleType

import pytest

from minillm.execution import collect, feature_runner, state
from minillm.models import trees as token_trees
from minillm.ops import slots
from minillm.scheduling import scheduler, survival
from minillm.speculative import heads, medusa, speculator, trees
from tests.matrix.cells import Cell
from tests.planting import plant_everywhere
from tests.speculative import test_trees as tests

SAMPLED = tests.SAMPLED
FINDERS = {
    "walk": lambda *_: tests.test_depths_paths_and_walks(),
    "moves": lambda *_: tests.test_moves_of_a_path_that_overlap("plain"),
    "codes": lambda *_: tests.test_moves_of_a_path_that_overlap("int8"),
    "one pass": lambda *_: tests.test_one_pass_over_a_tree_is_passes_over_its_paths("float32"),
    "in torch": lambda *_: tests.test_one_pass_over_a_tree_is_passes_over_its_paths("torch"),
    "greedy": lambda *_: tests.test_trees_grow_greedily_to_the_best(),
    "ranks": lambda *_: tests.test_tokens_are_ranked_with_the_noise_of_the_target(),
    "chain": lambda folder, tmp, _: tests.test_a_tree_that_is_a_chain_drafts_what_a_chain_drafts(
        folder, tmp, SAMPLED),
    "states": tests.test_hidden_states_move_with_their_positions,
    "canary": lambda folder, _, patch: tests.test_nothing_of_a_rejected_branch_is_cached(
        folder, patch, SAMPLED),
    "cell": lambda *_: tests.test_trees_change_no_token(Cell("bytes")),
    "logprobs": lambda folder, *_: tests.test_log_probabilities_are_those_of_the_path(folder),
    "size": lambda *_: tests.test_as_much_of_a_tree_as_pays(0.15, 2, 4),
    "values": lambda *_: tests.test_values_are_corrected_by_what_is_accepted(),
    "mean": lambda folder, tmp, _: tests.test_accuracies_are_a_mean_of_temperatures(folder, tmp),
}  # fmt: skip
DEPTHS = "starts[i] + np.array(tree.depths)"
PATHS = "order[begin:end, : tree.paths.shape[1]] = tree.paths"
BUGS: dict[str, tuple[ModuleType, str, str, str]] = {
    "positions by index": (token_trees, DEPTHS, "starts[i] + np.arange(size)", "one pass"),
    "lengths by index": (token_trees, "= spans[i] + 1,", "= starts[i] + 1 + np.arange(size),",
                         "one pass"),
    "the mask is shifted by one": (token_trees, PATHS, PATHS + "[:, ::-1]", "one pass"),
    "a tail begins a position late": (token_trees, "= spans[i] + 1, starts[i]",
                                      "= spans[i] + 1, starts[i] + 1", "one pass"),
    "ancestors are lost": (token_trees, "ancestors[node] = ancestors[parent + 1]", "pass", "walk"),
    "any child of any node": (token_trees, "parent + 1 == path[-1] and ", "", "walk"),
    "the sample of the root": (token_trees, "samples[path[-1]] == token", "samples[0] == token",
                               "walk"),
    "the last child's chain": (token_trees, "if parent == last:", "if parent >= last:", "walk"),
    "moves in descending order": (trees, "in enumerate(path):\n        if node == place",
                                  "in reversed(list(enumerate(path))):\n        if node == place",
                                  "moves"),
    "scales are not moved": (trees, "for cache in caches:", "for cache in caches[:2]:", "codes"),
    "moves the other way": (slots, "view[write] = view[read]", "view[read] = view[write]", "moves"),
    "the first layer only": (slots, "slice(slot // size, None, num_blocks)",
                             "slice(slot // size, slot // size + 1)", "moves"),
    "untangled by index": (slots, "torch.where((tail >= 0) & ", "torch.where((tail < 0) & ",
                           "in torch"),
    "a path is not moved": (collect, "keep_path(state.row, len(state.token_ids) - 1, nodes)",
                            "pass", "canary"),
    "a path is moved a slot too far": (collect, "len(state.token_ids) - 1, nodes",
                                       "len(state.token_ids), nodes", "canary"),
    "samples of a chain": (collect, "given = [given[node] for node in nodes]",
                           "given = given[: len(nodes)]", "cell"),
    "log-probabilities of a chain": (collect, "[logprobs[node] for node in nodes]",
                                     "logprobs[: len(nodes)]", "logprobs"),
    "noise by index": (state, "[start + d for d in self.tree.depths]", "range(start, end)",
                       "canary"),
    "rejected tokens are hashed": (scheduler, "sequence.token_ids, sequence.num_committed)",
                                   "sequence.token_ids, row.start + row.num_tokens)", "canary"),
    "penalties of another path": (speculator,
                                  "drafts, tree = [drafts[i] for i in tree.chain], None", "pass",
                                  "cell"),
    "states are not moved": (feature_runner, "*self.kv.tensors, *self.features.pages.tensors",
                             "self.kv.tensors", "states"),
    "all heads have the noise of the first": (medusa, "pack.position + later", "pack.position",
                                              "chain"),
    "ranks from the first head": (medusa, "(path[-1], len(path) - 1)", "(path[-1], 0)", "chain"),
    "the best token again": (trees, "logits.scatter_(1, ranks[-1][:, None], -torch.inf)", "pass",
                             "ranks"),
    "no siblings": (trees, "(*best[:-1], best[-1] + 1), ", "", "greedy"),
    "the worst first": (trees, "best = min(edge", "best = max(edge", "greedy"),
    "all of the tree": (survival, "min(1.0, rate * value)", "1.0", "size"),
    "one for all": (survival, ", self._own.setdefault(seq_id, Rate(KEEP_ONE)))", ",)", "values"),
    "the best temperature": (heads, ".mean(axis=0)", ".max(axis=0)", "mean"),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, folder, tmp_path, monkeypatch) -> None:
    module, right, wrong, finder = BUGS[bug]
    plant_everywhere(monkeypatch, module, right, wrong)
    with pytest.raises((AssertionError, pytest.fail.Exception, LookupError, ValueError)):
        FINDERS[finder](folder, tmp_path, monkeypatch)


def test_finders_pass_without_a_bug(folder, tmp_path, monkeypatch) -> None:
    """The quick ones; the others are tests of their own."""
    for name in ("walk", "greedy", "ranks", "values", "size"):
        FINDERS[name](folder, tmp_path, monkeypatch)
