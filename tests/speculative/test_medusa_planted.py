"""Deliberate bugs of draft heads, each with a test that finds it."""

import pytest

from minillm.execution import feature_runner
from minillm.speculative import features, heads, medusa
from tests.planting import plant_everywhere
from tests.speculative import test_medusa
from tests.speculative.headed import write_heads

FORMULA, HISTORY, OTHER = "formula", "history", "other model"
BUGS = {
    "the state of the last token": (medusa, "2, 1) for row in", "1, 1) for row in", FORMULA),
    "the state before": (medusa, "2, 1) for row in", "3, 1) for row in", FORMULA),
    "a smaller skip": (medusa, "skip[:, i] +", "skip[:, i] * 0.9 +", FORMULA),
    "the hidden layer of another head": (medusa, "inner[i]", "inner[i - 1]", FORMULA),
    "drafts of another row": (medusa, "seq_id] for row in rows]", "seq_id] for row in ordered]",
                              HISTORY),
    "positions of another row": (features, "start - first", "start[::-1] - first", FORMULA),
    "copies do not carry states": (features, "if plan.copies:", "if False:", HISTORY),
    "swaps do not carry states": (features, "and plan.swap_in:", "and False:", HISTORY),
    "states of other tokens": (feature_runner, "slot_mapping, hidden",
                               "slot_mapping.flip(0), hidden", FORMULA),
    "a position too late": (feature_runner, "slot_mapping, hidden", "slot_mapping + 1, hidden",
                            FORMULA),
    "blocks of another size": (features, "block, offset = np.divmod(positions, self",
                               "block, offset = np.divmod(positions, 2 * self", FORMULA),
    "one file of the model is not hashed": (heads, "for path in files:", "for path in files[1:]:",
                                            OTHER),
    "the hash is not compared": (heads, '!= data.get("base_hash")', "== 0", OTHER),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, folder, tmp_path, monkeypatch) -> None:
    module, right, wrong, finder = BUGS[bug]
    plant_everywhere(monkeypatch, module, right, wrong)
    made = write_heads(folder, tmp_path / "heads")

    def find() -> None:
        if finder == OTHER:
            test_medusa.test_heads_of_another_model(folder, tmp_path)
        elif finder == FORMULA:
            how = {"temperature": 0.0}
            test_medusa.test_drafts_are_those_of_the_formula(folder, made, monkeypatch, how)
        else:
            for seed in range(8):
                test_medusa.test_in_any_history(folder, made, monkeypatch, seed)

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        find()
