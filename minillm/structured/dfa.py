"""Regular expressions over bytes: which tokens may come next.

    "[ab]+c"  --parse-->  NFA  --sets of its states-->  DFA  next[state, byte]
                                                               |
    mask of a state: the tokens whose bytes lead from it to a live state

The syntax is Python's without what is not regular (lookaround, back-references, word boundaries).
The whole output must match. Classes such as ``\\d`` are ASCII; a character is its UTF-8 bytes, so a
token may end inside one.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from minillm.errors import InvalidRequestError
from minillm.structured.vocabulary import Vocabulary

MAX_NFA = 20_000  # states: a bound for a{1,100000}
MAX_DFA = 4_096  # states: a bound for (a|b)*a(a|b){20}
LAST = 0x10FFFF  # the last character
SURROGATES = range(0xD800, 0xE000)  # these are no characters
BORDERS = 0x80, 0x800, 0x10000, LAST + 1  # below which a character has 1, 2, 3, 4 bytes

Ranges = list[tuple[int, int]]  # of characters or of bytes, both ends included


def inverted(ranges: Ranges) -> Ranges:
    """The other characters."""
    gaps, first = [], 0
    for low, high in sorted(ranges):
        if first < low:
            gaps.append((first, low - 1))
        first = max(first, high + 1)
    return [*gaps, (first, LAST)] if first <= LAST else gaps


CLASSES: Mapping[str, Ranges] = {
    "DIGIT": [(48, 57)],
    "WORD": [(48, 57), (65, 90), (95, 95), (97, 122)],
    "SPACE": [(9, 13), (32, 32)],
}


def utf8_ranges(low: int, high: int) -> Iterator[Ranges]:
    """Characters `low` to `high` as sequences of byte ranges, each of which stands for all
    combinations of its bytes."""
    first, last = SURROGATES[0], SURROGATES[-1]
    middle = next(border for border in BORDERS if low < border)  # where longer characters begin
    if low <= last and high >= first:
        parts = [(low, first - 1), (last + 1, high)]
    elif high >= middle:
        parts = [(low, middle - 1), (middle, high)]
    else:
        parts = []
        for shift in (6, 12, 18) if low >= 0x80 else ():  # last bytes vary over all or nothing
            size = 1 << shift
            if low // size != high // size and (low % size or (high + 1) % size):
                middle = low - low % size + size if low % size else high - high % size
                parts = [(low, middle - 1), (middle, high)]
                break
        else:
            yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))
    for begin, end in parts:
        if begin <= end:
            yield from utf8_ranges(begin, end)


class Nfa:
    """A nondeterministic automaton over bytes. Each method adds a part behind state `at`, and
    returns the part's last state."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.empty: list[list[int]] = []  # by state: states that are reached without a byte
        self.bytes: list[list[tuple[int, int, int]]] = []  # by state: first, last byte, next state
        try:
            parsed = _parser.parse(pattern, re.UNICODE)
            if parsed.state.flags != re.UNICODE:
                raise self.refusal("it sets flags")
            items = list(parsed)
            if items[:1] == [(op.AT, op.AT_BEGINNING)]:
                del items[0]
            if items[-1:] == [(op.AT, op.AT_END)]:
                del items[-1]
            self.end = self.sequence(self.state(), items)
        except (re.error, OverflowError) as error:
            raise self.refusal(str(error)) from None
        except RecursionError:
            raise self.refusal("it has too many groups in groups") from None

    def refusal(self, why: str) -> InvalidRequestError:
        """The error of a pattern."""
        return InvalidRequestError(
            f"structured_outputs: the pattern {self.pattern[:60]!r} cannot be used: {why}."
        )

    def state(self, *after: int) -> int:
        """A new state, from which those in `after` are reached without a byte."""
        if len(self.empty) >= MAX_NFA:
            raise self.refusal(f"it needs more than {MAX_NFA:,} states")
        self.empty.append(list(after))
        self.bytes.append([])
        return len(self.empty) - 1

    def sequence(self, at: int, items: Any) -> int:
        """Parts behind each other."""
        for kind, value in items:
            at = self.part(at, kind, value)
        return at

    def part(self, at: int, kind: Any, value: Any) -> int:
        """One part of the parsed pattern."""
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self.characters(at, ranges_of(kind, value))
        if kind is op.SUBPATTERN and not value[1] and not value[2]:  # without flags such as (?i:
            return self.sequence(at, value[3])
        if kind is op.BRANCH:
            end = self.state()
            for items in value[1]:
                self.empty[self.sequence(at, items)].append(end)
            return end
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):  # greedy or not, the same texts match
            return self.repeated(at, *value)
        raise self.refusal(f"{str(kind).lower()} is not supported")

    def repeated(self, at: int, low: int, high: int, items: Any) -> int:
        """`low` to `high` copies of a part."""
        for _ in range(low):
            at = self.sequence(at, items)
        if high == op.MAXREPEAT:  # a loop through a state of its own
            begin = self.state()
            self.empty[at].append(begin)
            self.empty[self.sequence(self.state_behind(begin), items)].append(begin)
            return self.state_behind(begin)
        end = self.state()
        for _ in range(high - low):
            self.empty[at].append(end)
            at = self.sequence(self.state_behind(at), items)
        self.empty[at].append(end)
        return end

    def state_behind(self, at: int) -> int:
        """A new state that is reached from `at` without a byte."""
        self.empty[at].append(new := self.state())
        return new

    def characters(self, at: int, ranges: Ranges) -> int:
        """One of some characters."""
        end = self.state()
        for low, high in ranges:
            for sequence in utf8_ranges(low, high):
                state = at
                for place, (first, last) in enumerate(sequence, start=1):
                    after = end if place == len(sequence) else self.state()
                    self.bytes[state].append((first, last, after))
                    state = after
        return end

    def reach(self, states: list[int]) -> frozenset[int]:
        """These states, and those that are reached from them without a byte."""
        closure, todo = set(states), list(states)
        while todo:
            new = [state for state in self.empty[todo.pop()] if state not in closure]
            closure.update(new)
            todo += new
        return frozenset(closure)


def ranges_of(kind: Any, value: Any) -> Ranges:
    """The characters of a part of a pattern that stands for one."""
    if kind is op.ANY:
        return inverted([(10, 10)])
    if kind is op.RANGE:
        return [value]
    if kind is op.CATEGORY:
        name = str(value).removeprefix("CATEGORY_")
        ranges = CLASSES[name.removeprefix("NOT_")]
        return inverted(ranges) if name.startswith("NOT_") else ranges
    if kind is op.IN:
        negated = value[0][0] is op.NEGATE
        spans = [span for item in value[negated:] for span in ranges_of(*item)]
        return inverted(spans) if negated else spans
    return inverted([(value, value)]) if kind is op.NOT_LITERAL else [(value, value)]


class Dfa:
    """A deterministic automaton. State 0 is dead; from every other one a match can be reached. It
    starts in state 1.

    Attributes:
        next: int32 [S, 256], the state after each byte.
        accepting: bool [S], whether the text may end there.
    """

    def __init__(self, pattern: str):
        nfa = Nfa(pattern)
        sets = {frozenset(): 0, nfa.reach([0]): 1}
        todo, rows = list(sets), [np.zeros(256, dtype=np.int32)]
        while len(rows) < len(sets):
            row = np.zeros(256, dtype=np.int32)
            edges = [edge for state in todo[len(rows)] for edge in nfa.bytes[state]]
            borders = sorted({border for low, high, _ in edges for border in (low, high + 1)})
            for low, end in pairwise(borders):
                after = nfa.reach([state for a, b, state in edges if a <= low <= b])
                if after not in sets:
                    sets[after] = len(sets)
                    todo.append(after)
                row[low:end] = sets[after]
            rows.append(row)
            if len(sets) > MAX_DFA:
                raise nfa.refusal(f"it needs more than {MAX_DFA:,} states")
        self.next = np.stack(rows)
        self.accepting = np.array([nfa.end in states for states in sets])
        live, count = self.accepting.copy(), -1
        while count != live.sum():
            count = live.sum()
            live |= live[self.next].any(axis=1)
        self.next[~live[self.next]] = 0  # no match can be reached from there

    def mask(self, state: int, vocabulary: Vocabulary) -> np.ndarray:
        """bool [V]: the tokens whose bytes lead from `state` to a live state. All tokens advance
        together, one byte at a time, until they have died or ended."""
        allowed = np.zeros(len(vocabulary), dtype=bool)
        ids = vocabulary.with_text
        states, place = np.full(len(ids), state, dtype=np.int32), 0
        while len(ids):
            states = self.next[states, vocabulary.flat[vocabulary.start[ids] + place]]
            ids, states, place = ids[states > 0], states[states > 0], place + 1
            going = vocabulary.length[ids] > place
            allowed[ids[~going]] = True
            ids, states = ids[going], states[going]
        return allowed

    def after(self, state: int, text: bytes) -> int:
        """The state after some bytes."""
        for byte in text:
            state = int(self.next[state, byte])
        return state
