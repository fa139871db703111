"""e23.2: masks for drafts, and the way back. The task is in README.md."""

from collections.abc import Callable
from typing import Any


class Matcher:
    """Where a text stands in its automaton."""

    def __init__(self, automaton: Any):
        raise NotImplementedError("TODO e23.2: the start, and room for what came before")

    def allowed(self) -> set[int]:
        """Return the tokens that may come next, the end among them if the text is complete;
        behind the end none."""
        raise NotImplementedError("TODO e23.2: the automaton's tokens, and the end")

    def accept(self, token: int) -> bool:
        """Advance by a token. If it may not come next, return False and change nothing."""
        raise NotImplementedError("TODO e23.2: one step, or none")

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        raise NotImplementedError("TODO e23.2: back to an earlier state, without a step")


def prepare(matcher: Matcher, drafts: list[int]) -> list[set[int]]:
    """Return what is allowed at each position of a step: at the first one, and behind each draft.
    Stop at a draft that is not allowed or is the end. Leave the matcher behind the drafts."""
    raise NotImplementedError("TODO e23.2: ask, then advance")


def commit(matcher: Matcher, drafts: list[int], samples: list[int]) -> list[int]:
    """Return the samples that are kept: up to the first that differs from its draft. Leave the
    matcher behind them."""
    raise NotImplementedError("TODO e23.2: compare, take back, accept one")


def generate(
    model: Callable[[list[int], list[int], list[set[int]]], list[int]],
    propose: Callable[[list[int], int], list[int]],
    matcher: Matcher,
    end: int,
    count: int,
    k: int,
) -> list[int]:
    """Return the tokens that the model writes under the constraint: `count`, or up to the end."""
    raise NotImplementedError("TODO e23.2: propose, prepare, one pass, commit")
