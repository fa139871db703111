"""Chapter 23's own functions: distributions, the record, what a mask costs."""

import json
from fractions import Fraction
from itertools import product

import pytest

from minillm.structured.dfa import Dfa
from minillm.structured.matcher import DfaMatcher
from minillm.structured.vocabulary import Vocabulary
from minillm_exercises.chapters import ch23

WORDS = Vocabulary([b"a", b"b", b"ab", b"", b"ba", b"c"])
PATTERN = "a[ab]{2}c"


def dist(known: tuple[int, ...]) -> list[Fraction]:
    """Depends on the last token; the special token has a share, too."""
    weights = [1 + (3 * token + 5 * known[-1] if known else token) % 7 for token in range(6)]
    return [Fraction(weight, sum(weights)) for weight in weights]


def test_the_two_dists_are_those_of_listing_every_sequence():
    """All sequences of up to four tokens, judged as whole texts by re and step by step."""
    dfa = Dfa(PATTERN)
    alone: dict[tuple[int, ...], Fraction] = {}
    under: dict[tuple[int, ...], Fraction] = {}
    for length in range(1, 5):
        for tokens in product((0, 1, 2, 4, 5), repeat=length):
            text = b"".join(WORDS.tokens[token] for token in tokens)
            if len(text) != 4 or text[:1] != b"a" or text[3:] != b"c" or b"c" in text[:3]:
                continue
            p, q, state = Fraction(1), Fraction(1), 1
            for place, token in enumerate(tokens):
                shares, mask = dist(tokens[:place]), dfa.mask(state, WORDS)
                p *= shares[token]
                q *= shares[token] / sum(s for s, may in zip(shares, mask, strict=True) if may)
                state = dfa.after(state, WORDS.tokens[token])
            alone[tokens], under[tokens] = p, q
    found = list(ch23.ways(dist, dfa, WORDS))
    assert {way.tokens: way.alone for way in found} == alone
    assert {way.tokens: way.masked for way in found} == under
    rejected, masked = ch23.two_dists(found, WORDS)
    assert sum(rejected.values()) == sum(masked.values()) == 1
    assert set(rejected) == {"aaac", "aabc", "abac", "abbc"}
    assert rejected != masked
    assert 0 < ch23.distance(rejected, masked) < 1
    assert ch23.distance({"x": 1, "y": 0}, {"x": 0, "y": 1}) == 1


@pytest.mark.parametrize("root", [Fraction(1, 2), Fraction(1, 10), Fraction(2, 3)])
def test_no_share_differs_more_than_the_formula(root):
    """The difference for a first token of share x and a valid rest r, by hand."""
    rest = root**2
    shares = [Fraction(i, 200) for i in range(1, 200)]
    differences = [x - x * rest / (x * rest + 1 - x) for x in shares]
    at, most = ch23.largest(rest)
    assert at - at * rest / (at * rest + 1 - at) == most
    assert max(differences) <= most
    assert most - max(differences) < Fraction(1, 1000)


def test_the_recorded_answers_are_complete_and_the_masked_ones_valid():
    record = ch23.real()
    people, answers = record["people"], record["answers"]
    assert list(answers) == [
        f"{q}, {way}" for q in record["questions"] for way in ("free", "masked")
    ]
    assert {len(texts) for texts in answers.values()} == {len(people)}
    for sentence, name, _ in people:
        assert name in sentence
    for way in ("fields, masked", "example, masked"):
        assert ch23.judged(answers[way], people)["valid"] == len(people)
    right = [json.dumps({"name": name, "age": age}) for _, name, age in people]
    assert ch23.judged(right, people) == {"valid": 20, "right": 20}
    assert ch23.judged([f"Sure: {each}" for each in right], people) == {"valid": 0, "right": 0}
    assert ch23.judged(right[1:] + right[:1], people) == {"valid": 20, "right": 0}


def test_masks_are_timed_and_the_matcher_comes_back(monkeypatch):
    filled = []
    monkeypatch.setenv("MINILLM_QUICK", "1")
    monkeypatch.setattr(ch23, "find_spec", lambda name: None)
    right = DfaMatcher.fill

    def fill(matcher, bits):
        filled.append((matcher._states[-1], len(matcher._masks)))
        right(matcher, bits)

    monkeypatch.setattr(DfaMatcher, "fill", fill)
    found = ch23.mask_seconds(WORDS, PATTERN, [0, 4, 5])
    assert list(found) == ["dfa.py, new state", "dfa.py, kept"]
    assert min(found.values()) > 0
    assert {kept for _, kept in filled[:3]} == {0}
    assert [state for state, _ in filled[:3]] == [state for state, _ in filled[3:]]


@pytest.mark.parametrize(("text", "fault"), [
    ('{"name": "a", "age": 3}', ""), ('{"name": "a", "age": 3', "no JSON"),
    ('{"name": "a", "age": 3} yes', "no JSON"), ('["name", "age"]', "other fields"),
    ('{"age": 3, "name": "a"}', "other fields"), ('{"name": "a"}', "other fields"),
    ('{"name": "a", "age": "3"}', "other types"), ('{"name": "a", "age": true}', "other types"),
])  # fmt: skip
def test_faults_of_records(text, fault):
    assert ch23.fault(text, {"name": str, "age": int}) == fault


def test_choices_are_counted_before_each_token():
    """Behind "a" come a, b, ab, ba: two first bytes; at the end only c."""
    assert ch23.choices(Dfa(PATTERN), WORDS, [0, 4, 5]) == [(2, 1), (4, 2), (1, 1)]
