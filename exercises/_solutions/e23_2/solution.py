"""A list of states: one for each accepted token, so the way back is a shorter list.

Behind the end the state is None: nothing is allowed there. `prepare` asks before it advances, so
its first set is that of the known text. Of the n drafts that it has accepted `commit` keeps those
that equal the samples, takes the others back, and accepts the sample that replaces or follows them.
"""

from collections.abc import Callable
from typing import Any


class Matcher:
    """The states so far, the present one last."""

    def __init__(self, automaton: Any):
        self.automaton = automaton
        self.states = [automaton.start]

    def allowed(self) -> set[int]:
        """Nothing behind the end."""
        state = self.states[-1]
        if state is None:
            return set()
        found = set(self.automaton.tokens(state))
        if self.automaton.accepts(state):
            found.add(self.automaton.end)
        return found

    def accept(self, token: int) -> bool:
        """One more state, or none."""
        state = self.states[-1]
        if state is None:
            return False
        if token == self.automaton.end:
            if not self.automaton.accepts(state):
                return False
            self.states.append(None)
            return True
        after = self.automaton.step(state, token)
        if after is None:
            return False
        self.states.append(after)
        return True

    def rollback(self, count: int) -> None:
        """A shorter list."""
        del self.states[len(self.states) - count :]


def prepare(matcher: Matcher, drafts: list[int]) -> list[set[int]]:
    """Ask, then advance, as long as the drafts may come."""
    sets = [matcher.allowed()]
    for token in drafts:
        if token == matcher.automaton.end or not matcher.accept(token):
            break
        sets.append(matcher.allowed())
    return sets


def commit(matcher: Matcher, drafts: list[int], samples: list[int]) -> list[int]:
    """Back to the last right draft, and one token further."""
    right = 0
    while right < len(samples) - 1 and samples[right] == drafts[right]:
        right += 1
    matcher.rollback(len(samples) - 1 - right)
    matcher.accept(samples[right])
    return samples[: right + 1]


def generate(
    model: Callable[[list[int], list[int], list[set[int]]], list[int]],
    propose: Callable[[list[int], int], list[int]],
    matcher: Matcher,
    end: int,
    count: int,
    k: int,
) -> list[int]:
    """Steps until the end or until there are `count` tokens."""
    text: list[int] = []
    while len(text) < count and end not in text:
        most = min(k, count - len(text) - 1)
        drafts = propose(list(text), most) if most > 0 else []
        sets = prepare(matcher, drafts)
        samples = model(list(text), drafts[: len(sets) - 1], sets)
        text += commit(matcher, drafts, samples)
    return text
