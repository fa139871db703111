"""Deliberate bugs of EAGLE, each with a test that finds it."""

from functools import partial

import pytest

from minillm.ops import cpu_layers
from minillm.speculative import draft_model, eagle, features, heads, parallel_eagle
from tests.planting import plant_everywhere
from tests.speculative import test_eagle
from tests.speculative.eagled import write_eagle
from tests.speculative.test_draft_model import SAMPLED

FORMULA, IN_C, HISTORY, OTHER = "formula", "in C", "history", "other model"
ACCEPTED, SPANS, CACHE, PARALLEL = "accepted", "spans", "cache", "parallel"
BUGS = {
    "no bug": (features, "if plan.copies:", "if plan.copies:", ""),
    "features a position too late": (
        eagle, "max(start - 1, 0), end", "max(start, 0), end", FORMULA),
    "the first position has the feature of the last": (
        eagle, "features = known.new_zeros(", "features = known[-1:].new_ones(", FORMULA),
    "features of the positions themselves": (
        eagle, "np.flatnonzero(places)", "np.flatnonzero(places < places.max())", FORMULA),
    "a depth too early in C": (
        cpu_layers, "else None for i in range(count)", "else None for i in range(1, count + 1)",
        IN_C),
    "a depth too early": (
        eagle, "zip(depths, columns", "zip((max(n - 1, 1) for n in depths), columns", FORMULA),
    "no residual stream": (eagle, "return self.mlp(x) + residual", "return self.mlp(x)", FORMULA),
    "halves exchanged": (
        eagle, "(self.embedding_norm(embedded), self.feature_norm(features))",
        "(self.feature_norm(features), self.embedding_norm(embedded))", FORMULA),
    "norms exchanged": (
        eagle, "(self.embedding_norm(embedded), self.feature_norm(features))",
        "(self.feature_norm(embedded), self.embedding_norm(features))", FORMULA),
    "the embedding of the token before": (
        eagle, "self.target.embedding(batch.input_ids)",
        "self.target.embedding(batch.input_ids.roll(1))", FORMULA),
    "what is fed back was normed": (
        eagle, "replace(batch, input_ids=tokens), hidden)",
        "replace(batch, input_ids=tokens), self.layer.norm(hidden))", FORMULA),
    "logits without the norm": (
        eagle, "target.logits(self.layer.norm(hidden))", "target.logits(hidden)", FORMULA),
    "drafts without their own keys": (
        draft_model, "+ depth - 1 for row in active]", "- 1 for row in active]", FORMULA),
    "accepted drafts keep their keys": (
        eagle, "keeps_drafts = False", "keeps_drafts = True", ACCEPTED),
    "and are computed again from the first": (
        draft_model, "start = self._num_computed(row)", "start = 0", SPANS),
    "keys are never old": (
        draft_model, "min(self.shadow.num_computed(row.new.seq_id), len(row.token_ids) - 1)",
        "len(row.token_ids) - 1", FORMULA),
    "copies do not carry features": (features, "if plan.copies:", "if False:", HISTORY),
    "the plan moves keys only": (eagle, "self.features.follow(plan)", "pass", HISTORY),
    "any pass stores features": (eagle, "return kv is self.kv or (", "return True or (", CACHE),
    "the mask's halves exchanged": (
        parallel_eagle, "embedded[at], features[at] =", "features[at], embedded[at] =", PARALLEL),
    "masks where tokens are": (
        parallel_eagle, "place >= known.repeat", "place >= known.repeat(counts) - 1 + 0 * "
        "known.repeat", PARALLEL),
    "the first draft from a mask": (parallel_eagle, "+ known - 1)", "+ known)", PARALLEL),
    "all drafts from the last token": (parallel_eagle, "+ depth)])", "+ 0 * depth)])", PARALLEL),
    "a mask too few": (parallel_eagle, "chunk.row.num_drafts - 1 for", "max(chunk.row.num_drafts - "
                       "2, 0) for", PARALLEL),
    "the hash is not compared": (heads, '!= data.get("base_hash")', "== 0", OTHER),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, folder, tmp_path, monkeypatch) -> None:
    module, right, wrong, finder = BUGS[bug]
    above = draft_model.DraftModel
    plant_everywhere(monkeypatch, module, right, wrong)
    if module is draft_model:  # Eagle's class above stays: it gets the methods
        for name in ("_chunks", "_draft", "_num_computed"):
            monkeypatch.setattr(above, name, vars(draft_model.DraftModel)[name])
    (apart := tmp_path / "apart").mkdir()
    layer = write_eagle(folder, tmp_path / "layer")
    masked, how = write_eagle(folder, apart / "masked", parallel=True), {"temperature": 0.0}

    history = partial(test_eagle.test_in_any_history, folder, layer, monkeypatch)
    formula = partial(test_eagle.test_drafts_are_those_of_the_formula, folder, layer, monkeypatch)
    together = test_eagle.test_drafts_in_parallel_are_those_of_the_formula_in_one_pass
    spans = test_eagle.test_positions_are_computed_once_and_accepted_drafts_again
    finders = {
        FORMULA: lambda: formula(how),
        IN_C: lambda: test_eagle.test_of_other_layers(apart, monkeypatch, "llama"),
        HISTORY: lambda: [history(seed) for seed in range(4)],
        OTHER: lambda: test_eagle.test_a_layer_of_another_model(folder, apart),
        ACCEPTED: lambda: test_eagle.test_after_drafts_were_accepted(folder, layer, monkeypatch),
        PARALLEL: lambda: together(folder, masked, monkeypatch, SAMPLED),
        SPANS: lambda: spans(folder, layer, monkeypatch),
        CACHE: lambda: test_eagle.test_a_pass_over_another_cache_stores_nothing(folder, layer),
    }
    if not finder:
        for find in finders.values():
            find()
        return
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        finders[finder]()
