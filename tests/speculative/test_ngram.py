"""Drafts of n-grams are those of a search through the whole sequence, and cost no search."""

import random

import pytest

from minillm.api.sampling_params import SamplingParams
from minillm.scheduling.plan import NewSequence
from minillm.speculative.ngram import NGrams
from minillm.speculative.proposer import DraftRow


def searched(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """What follows the last earlier place of the longest n-gram at the end, token by token: where
    the sequence ends, the draft itself goes on."""
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[end - length : end] == tokens[-length:]:
                longer = list(tokens)
                for i in range(count):
                    longer.append(longer[end + i])
                return longer[len(tokens) :]
    return []


def row_of(tokens: list[int], count: int, seq_id: int = 0) -> DraftRow:
    new = NewSequence(seq_id, 0, 1, tuple(tokens[:1]), SamplingParams(), 0)
    return DraftRow(new, tokens, count, 0)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 3), (2, 4), (3, 3)])
@pytest.mark.parametrize("vocabulary", [2, 4, 20])
def test_drafts_are_what_followed_last_time(lengths, vocabulary):
    rng = random.Random(vocabulary)
    proposer = NGrams(*lengths)
    tokens: list[int] = []
    for _ in range(200):
        tokens += [rng.randrange(vocabulary) for _ in range(rng.randint(1, 5))]
        count = rng.randint(1, 6)
        assert proposer.propose([row_of(tokens, count)]) == [searched(tokens, *lengths, count)]


def test_sequences_do_not_see_each_other():
    proposer = NGrams(2, 3)
    repeated, other = [1, 2, 3, 4, 1, 2], [7, 8, 1, 2]
    assert proposer.propose([row_of(repeated, 2, 0), row_of(other, 2, 1)]) == [[3, 4], []]


def test_a_forgotten_sequence_begins_anew():
    proposer = NGrams(1, 1)
    assert proposer.propose([row_of([5, 6, 5], 1)]) == [[6]]
    proposer.forget(0)
    assert proposer.propose([row_of([5, 9, 5], 1)]) == [[9]]
    proposer.forget(3)  # unknown is fine


def test_a_prompt_of_one_token_has_no_draft():
    assert NGrams(1, 4).propose([row_of([3], 4)]) == [[]]
