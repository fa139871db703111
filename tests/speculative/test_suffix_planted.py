"""Deliberate bugs of the suffix proposer, each with a test that finds it."""

import pytest

from minillm.speculative import suffix
from tests.planting import plant
from tests.speculative import test_suffix

TREE = test_suffix.test_guesses_are_those_of_a_suffix_tree
CUT = test_suffix.test_what_is_cut_is_as_if_it_had_never_been
SALT = test_suffix.test_earlier_outputs_are_continued_under_the_same_salt_only
KEPT_ONCE = test_suffix.test_a_preempted_sequence_is_kept_once
RATES = test_suffix.test_rates_follow_what_was_right
WRONG = test_suffix.test_what_was_wrong_before_is_no_longer_drafted
BETTER = test_suffix.test_the_better_of_both_sources_is_taken
BOUND = test_suffix.test_what_is_not_probable_is_not_drafted
BUGS = {
    "salts share": ("_past.get(state.new.cache_salt)", '_past.get("")', SALT),
    "prompts are kept": ("tokens[state.new.num_prompt_tokens :]", "tokens[:]", SALT),
    "into the next output": ("if token == END:", "if False:", CUT),
    "forgotten n-grams count": ("del latest[ngram]", "pass", CUT),
    "memory grows": ("previous.pop(end, None)", "pass", CUT),
    "ends before the text count": ("last >= start + length and ", "", CUT),
    "positions are not moved": ("self._start += count", "pass", CUT),
    "the end matches itself": ("start + length), size)", "start + length), size + 1)", TREE),
    "shorter matches vote": ("return size, whole", "return size, ends", TREE),
    "the oldest of equal ones": ("max(candidates, key", "max(candidates[::-1], key", TREE),
    "kept twice": ("output[self._num_kept.get(seq_id, 0) :]", "output", KEPT_ONCE),
    "behind a wrong token": ("if guess != token:", "if False:", RATES),
    "nothing is learned": ("rates.learn(guesses, tokens[state.num_seen :])", "pass", WRONG),
    "the worse source": ("max((guess for", "min((guess for", BETTER),
    "no bound": (" if guess.probability >= self.least]", "]", BOUND),
}


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, finder = BUGS[bug]
    plant(monkeypatch, suffix, right, wrong)
    for name in ("Rates", "Suffixes", "Text"):
        monkeypatch.setattr(test_suffix, name, getattr(suffix, name))
    with pytest.raises((AssertionError, ExceptionGroup, LookupError)):
        finder()
