"""Another way: a history of pairs, and a flag for the end."""

from collections.abc import Callable
from typing import Any


class Matcher:
    """The present state, whether the end has come, and what both were before each token."""

    def __init__(self, automaton: Any):
        self.automaton, self.state, self.done = automaton, automaton.start, False
        self.before: list[tuple[Any, bool]] = []

    def allowed(self) -> set[int]:
        """The union of two sets."""
        if self.done:
            return set()
        last = {self.automaton.end} if self.automaton.accepts(self.state) else set()
        return set(self.automaton.tokens(self.state)) | last

    def accept(self, token: int) -> bool:
        """The end is a flag, another token a state."""
        is_end = token == self.automaton.end
        if self.done or (is_end and not self.automaton.accepts(self.state)):
            return False
        after = self.state if is_end else self.automaton.step(self.state, token)
        if after is None:
            return False
        self.before.append((self.state, self.done))
        self.state, self.done = after, is_end
        return True

    def rollback(self, count: int) -> None:
        """One token at a time."""
        for _ in range(count):
            self.state, self.done = self.before.pop()


def prepare(matcher: Matcher, drafts: list[int]) -> list[set[int]]:
    """By recursion."""
    now = matcher.allowed()
    usable = bool(drafts) and drafts[0] != matcher.automaton.end and drafts[0] in now
    if not usable:
        return [now]
    matcher.accept(drafts[0])
    return [now, *prepare(matcher, drafts[1:])]


def commit(matcher: Matcher, drafts: list[int], samples: list[int]) -> list[int]:
    """Where the first difference is, if there is one."""
    used = drafts[: len(samples) - 1]
    wrong = [i for i, (a, b) in enumerate(zip(used, samples, strict=False)) if a != b]
    right = wrong[0] if wrong else len(used)
    matcher.rollback(len(used) - right)
    matcher.accept(samples[right])
    return list(samples[: right + 1])


def generate(
    model: Callable[[list[int], list[int], list[set[int]]], list[int]],
    propose: Callable[[list[int], int], list[int]],
    matcher: Matcher,
    end: int,
    count: int,
    k: int,
) -> list[int]:
    """Without a list of steps."""
    text: list[int] = []
    while True:
        left = count - len(text)
        if left <= 0 or end in text:
            return text
        drafts = list(propose(list(text), min(k, left - 1))) if min(k, left - 1) else []
        sets = prepare(matcher, drafts)
        text.extend(commit(matcher, drafts, model(list(text), drafts[: len(sets) - 1], sets)))
