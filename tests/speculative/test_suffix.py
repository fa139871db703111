"""Suffix drafts are those of a search through all text, and one salt's outputs stay its own."""

from collections import Counter
from collections.abc import Sequence
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minillm import LLM, SamplingParams
from minillm.scheduling.plan import NewSequence
from minillm.speculative import suffix
from minillm.speculative.proposer import DraftRow
from minillm.speculative.suffix import END, NUM_RATES, Guess, Rates, Suffixes, Text
from tests.engine.small import make, tokens
from tests.matrix.cells import folder_of

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


ALWAYS = Rates()  # every guess is right as often as its share says
ALWAYS.of[:] = [1.0] * len(ALWAYS.of)


def searched(texts: list[list[int]], tail: list[int], count: int, least: float) -> list[Guess]:
    """What a suffix tree over the texts answers: counts of all continuations of the longest end of
    `tail` that a token follows."""
    for length in range(len(tail), 0, -1):
        places = [
            (text, end)
            for text in texts
            for end in range(length, len(text))
            if text[end - length : end] == tail[-length:]
        ]
        if places:
            break
    else:
        return []
    guesses: list[Guess] = []
    probability = 1.0
    while len(guesses) < count and probability >= least:
        places = [(text, end) for text, end in places if end < len(text)]
        counts = Counter(text[end] for text, end in reversed(places))
        if not counts or counts.most_common(1)[0][0] == END:
            break
        token, votes = counts.most_common(1)[0]
        probability *= votes / counts.total()
        guesses.append(
            Guess(token, min(length + len(guesses), NUM_RATES), votes / counts.total(), probability)
        )
        places = [(text, end + 1) for text, end in places if text[end] == token]
    return guesses


@patch.object(suffix, "MAX_OCCURRENCES", 1000)
@given(TOKENS, st.lists(st.integers(1, 5)), st.integers(1, 12), st.sampled_from([0.0, 0.4, 0.8]))
@example([1, 2, 3, 4, 5, 0, 2, 3, 4, 6, 1, 2, 3, 4], [], 4, 0.0)
def test_guesses_are_those_of_a_suffix_tree(ids, parts, depth, least):
    """While a text grows by any parts."""
    text = Text([])
    for size in [*parts, len(ids)]:
        text.tokens += ids[len(text.tokens) : len(text.tokens) + size]
        text.update()
        tail = text.tokens[-depth:]
        assert text.guess(tail, 6, least, ALWAYS) == searched([text.tokens], tail, 6, least)


@patch.object(suffix, "MAX_OCCURRENCES", 1000)
@given(
    st.lists(TOKENS, min_size=1, max_size=8),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.integers(0, 8),
)
@example([[0], [0, 1]], [2, 0], 1)
def test_what_is_cut_is_as_if_it_had_never_been(outputs, tail, num_cut):
    """The oldest outputs are forgotten exactly, and no match reaches from one into the next."""
    text = Text([])
    for output in outputs:
        text.tokens += [*output, END]
        text.update()
    for output in outputs[:num_cut]:
        text.cut(len(output) + 1)
    left = [[*output, END] for output in outputs[num_cut:]]
    assert text.guess(tail, 6, 0.0, ALWAYS) == searched(left, tail, 6, 0.0)
    for _, latest, previous in text._tables:
        assert max(len(latest), len(previous)) <= sum(map(len, left))


def test_only_the_latest_occurrences_count(monkeypatch):
    monkeypatch.setattr(suffix, "MAX_OCCURRENCES", 3)
    text = Text([1, 5, *[1, 6, 1, 6, 1, 7], 1])
    text.update()
    (guess,) = text.guess([1], 1, 0.0, ALWAYS)
    assert (guess.token, guess.share) == (6, pytest.approx(2 / 3))


def test_rates_follow_what_was_right():
    rates = Rates()
    before = list(rates.of)
    assert before == sorted(before)
    for _ in range(200):
        rates.learn([Guess(1, 16, 0.5, 0.5), Guess(2, 8, 1.0, 0.5), Guess(3, 1, 1, 0.5)], [1, 9, 3])
    assert rates.of[16] == 1.0  # right more often than its share
    assert rates.of[8] < 0.2
    assert rates.of[1] == before[1]  # what follows a wrong token is not known


# ---- the proposer -----------------------------------------------------------------------------


class Sequences:
    """Sequences that begin, grow, and end or are preempted."""

    def __init__(self, least: float = 0.3, depth: int = 24, max_past: int = 100):
        self.proposer = Suffixes(least, depth, max_past)
        self.texts: dict[int, tuple[NewSequence, list[int]]] = {}

    def begin(
        self, seq_id: int, prompt: list[int], salt: str = "", output: Sequence[int] = ()
    ) -> None:
        known = [*prompt, *output]
        new = NewSequence(seq_id, 0, len(prompt), tuple(known), SamplingParams(), 0)
        new = new._replace(cache_salt=salt)
        self.texts[seq_id] = new, known
        self.proposer.begin(new, known)

    def drafts(self, seq_id: int, count: int = 4) -> list[int]:
        new, known = self.texts[seq_id]
        return self.proposer.propose([DraftRow(new, known, count, 0)])[0]

    def end(self, seq_id: int, output: list[int]) -> None:
        self.texts[seq_id][1].extend(output)
        self.proposer.forget(seq_id)


def test_earlier_outputs_are_continued_under_the_same_salt_only():
    some = Sequences()
    some.begin(0, [1, 2], "a")
    some.end(0, [3, 4, 5, 6, 7])
    for seq_id, (salt, found) in enumerate([("a", [5, 6, 7]), ("", []), ("b", [])], start=1):
        some.begin(seq_id, [9, 3, 4], salt)
        assert some.drafts(seq_id) == found  # and not beyond the end of the output
    some.begin(5, [1, 2], "a")
    assert some.drafts(5) == []  # prompts are not kept


def test_a_sequence_sees_itself_and_no_other_that_runs():
    some = Sequences()
    some.begin(0, [1, 2, 3, 1, 2])
    some.begin(1, [1, 2])
    assert some.drafts(0) == [3, 1, 2]
    assert some.drafts(1) == []


def test_the_better_of_both_sources_is_taken():
    some = Sequences()
    some.begin(0, [0])
    some.end(0, [7, 8, 1, 2, 3, 4, 5])
    some.begin(1, [2, 9, 9, 8, 1, 2])
    assert some.drafts(1) == [3, 4, 5]  # a match of three tokens, not of one


def test_what_is_not_probable_is_not_drafted():
    some = Sequences(least=0.6)
    some.begin(0, [*[1, 2, 3, 4], *[1, 2, 3, 5], 1, 2])
    assert some.drafts(0) == [3]
    assert Sequences(least=1.0).proposer.propose([]) == []
    none = Sequences(least=1.0)
    none.begin(0, [1, 2, 1])
    assert none.drafts(0) == []


def test_what_was_wrong_before_is_no_longer_drafted():
    some = Sequences(least=0.4)
    some.begin(0, [each for i in range(20) for each in (i, 100 + i)])
    found = []
    for i in range(20):  # each number comes again, and is followed by another one than before
        some.texts[0][1].append(i)
        found.append(some.drafts(0, 1))
        some.texts[0][1].append(200 + i)
    assert found[0] == [100]
    assert found[-1] == []


@pytest.mark.parametrize(("max_past", "most_tokens"), [(2, 1 << 16), (100, 9)])
def test_the_oldest_outputs_are_forgotten(max_past, most_tokens, monkeypatch):
    monkeypatch.setattr(suffix, "MAX_PAST_TOKENS", most_tokens)
    some = Sequences(max_past=max_past)
    for number in range(4):
        some.begin(number, [0], "ab"[number % 2])
        some.end(number, [number + 10, 50, 60])
    some.begin(9, [0], "a")
    for number, found in enumerate([[], [], [50, 60], []]):
        some.begin(20 + number, [number + 10], "a")
        assert some.drafts(20 + number) == found
    assert len(some.proposer._outputs) == len(some.proposer._num_kept) == 2
    assert some.proposer._num_past == 8
    none = Sequences(max_past=0)
    none.begin(0, [1])
    none.end(0, [2, 3])
    assert not none.proposer._past


def test_a_preempted_sequence_is_kept_once():
    some = Sequences()
    some.begin(0, [1])
    some.end(0, [2, 3])  # preempted
    some.begin(0, [1], output=[2, 3])
    some.end(0, [4])
    some.begin(0, [1], output=[2, 3, 4])
    some.end(0, [])
    assert some.proposer._past[""].tokens == [2, 3, END, 4, END]


# ---- the engine -------------------------------------------------------------------------------


def run(llm: LLM, prompts: list[list[int]], salt: str | None = None) -> tuple[list, int, int]:
    """Tokens, and drafted and accepted tokens."""
    counters = llm.engine.scheduler.counters
    before = counters.num_draft_tokens, counters.num_accepted_tokens
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=30, ignore_eos=True)
    asked = [{"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})} for ids in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False)
    drafted = counters.num_draft_tokens - before[0], counters.num_accepted_tokens - before[1]
    return [tokens(each) for each in outputs], *drafted


def test_a_request_that_comes_again_is_drafted_from_its_first_output():
    prompts = [[i, i + 1, i + 2, i + 3] for i in range(0, 40, 10)]
    config = {"method": "suffix", "num_speculative_tokens": 4}
    plain, _, _ = run(make(folder_of("bytes")), prompts)
    llm = make(folder_of("bytes"), speculative_config=config)
    first, _, accepted = run(llm, prompts, "a")
    other, _, elsewhere = run(llm, prompts, "b")
    again, drafted, found = run(llm, prompts, "a")
    assert first == other == again == plain
    assert found > 80 > 2 * max(accepted, elsewhere)
    assert drafted < 1.5 * found
