"""Deliberate bugs of constraints, each with a cell of the matrix, or a test, that finds it."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from minillm.sampling.edits import Edits
from minillm.sampling.masks import StructuredOutputs
from minillm.scheduling import ahead
from minillm.structured.grammars import Constraint, Grammars
from minillm.structured.matcher import GuidanceMatcher, Matcher
from minillm.structured.vocabulary import Vocabulary
from tests.matrix.cells import Cell, check, reference_of
from tests.structured import test_dfa, test_grammars

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
DRAFTED = Cell(chunk=7, drafts="mostly right")


def swap(owner: object, name: str, wrong: object) -> Plant:
    return lambda patch: patch.setattr(owner, name, wrong)


def rollback_by(change: Callable[[int], int]) -> Plant:
    """The matcher goes back by another number of tokens than it went ahead."""
    back = GuidanceMatcher.rollback
    return swap(GuidanceMatcher, "rollback", lambda self, count: back(self, change(count)))


def one_position_late(patch: Patch) -> None:
    masks = Constraint.masks

    def late(self, position, drafts, out):
        wide = np.zeros((len(out) + 1, out.shape[1]), dtype=np.uint8)
        wide[1:] = 255
        masks(self, position, drafts, wide[:-1])
        out[:] = np.roll(wide[:-1], 1, axis=0)

    patch.setattr(Constraint, "masks", late)


def shared_state(patch: Patch) -> None:
    """Forks and other requests advance the same matcher."""
    patch.setattr(GuidanceMatcher, "copy", lambda self: self)


def nothing_is_replayed(patch: Patch) -> None:
    """A preempted or forked row begins at the start of its text again."""
    begin = Constraint._begin

    def wrong(self) -> Matcher:
        self._first = len(self._tokens)
        return begin(self)

    patch.setattr(Constraint, "_begin", wrong)


def replayed_twice(patch: Patch) -> None:
    """State is kept after a preemption, and the tokens are replayed all the same."""
    matcher, kept = Grammars.matcher, {}

    def wrong(self, given):
        return kept.setdefault(given, matcher(self, given))

    patch.setattr(Grammars, "matcher", wrong)


def ends_always(patch: Patch) -> None:
    patch.setattr(GuidanceMatcher, "is_accepting", True)


def rows_keep_their_constraints(patch: Patch) -> None:
    """A reused row has the constraint of the sequence before it."""
    set_row, kept = StructuredOutputs.set_row, {}

    def wrong(self, row, new, known):
        return kept.setdefault((self, row), set_row(self, row, new, known))

    patch.setattr(StructuredOutputs, "set_row", wrong)


def moved_rows_lose_their_constraints(patch: Patch) -> None:
    move = Edits.move

    def wrong(self, source, target):
        for edit in self.edits:
            if isinstance(edit, StructuredOutputs) and source in edit.rows:
                self._of[source].remove(edit)
                del edit.rows[source]
        move(self, source, target)

    patch.setattr(Edits, "move", wrong)


BUGS: Mapping[str, tuple[Plant, Cell]] = {
    "rollback by one too few": (rollback_by(lambda count: max(count - 1, 0)), DRAFTED),
    "no rollback": (rollback_by(lambda count: 0), DRAFTED),
    "one position late": (one_position_late, DRAFTED),
    "state shared by forks": (shared_state, Cell()),
    "nothing is replayed": (nothing_is_replayed, Cell(chunk=7, pool="recompute")),
    "replayed twice": (replayed_twice, Cell(chunk=32, pool="swap")),
    "ends always": (ends_always, Cell()),
    "rows keep their constraints": (rows_keep_their_constraints, Cell()),
    "moved rows lose their constraints": (moved_rows_lose_their_constraints, Cell(graphs=True)),
    "forced text is remembered": (rollback_by(lambda count: 0), Cell(drafts="ngram")),
    "planned ahead": (
        swap(ahead, "is_predictable",
             lambda row, sequence: row.num_logits <= 1 and not row.num_forks),
        Cell(overlaps=True)),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: Patch) -> None:
    plant, cell = BUGS[name]
    reference_of(cell)
    plant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017,PT011  (a difference, or the engine itself notices)
        check(cell)


@pytest.mark.mutation
@pytest.mark.parametrize("cell", sorted({cell for _, cell in BUGS.values()}, key=str), ids=str)
def test_the_same_cell_passes_without_a_bug(cell: Cell) -> None:
    check(cell)


def test_padding_that_is_allowed_is_found(monkeypatch: Patch, tokenizer) -> None:
    """And names of special tokens that are text."""
    init = Vocabulary.__init__
    wrong = lambda self, tokens: init(self, [each or b"a" for each in tokens])  # noqa: E731
    monkeypatch.setattr(Vocabulary, "__init__", wrong)
    made = Grammars(tokenizer, tokenizer.vocab_size + 37)
    for test in (
        test_dfa.test_special_tokens_and_padding_have_no_bytes,
        test_grammars.test_ends_follow_a_complete_text_only,
    ):
        with pytest.raises(AssertionError):
            test(made, tokenizer)
