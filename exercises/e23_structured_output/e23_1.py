"""e23.1: which tokens may come next. The task is in README.md."""

from typing import Any


def live(automaton: Any) -> set[int]:
    """Return the states from which a complete text can be reached, by no byte or by several."""
    raise NotImplementedError("TODO e23.1: begin with the accepting states, and go backwards")


def mask(automaton: Any, alive: set[int], state: int, tokens: list[bytes]) -> list[bool]:
    """Return for each token whether its bytes lead from `state` to a state in `alive`. A token
    without bytes is never allowed."""
    raise NotImplementedError("TODO e23.1: walk the bytes; a shared beginning only once")


def allowed(
    automaton: Any, alive: set[int], state: int, tokens: list[bytes], end: int
) -> list[bool]:
    """Return the mask for sampling: `mask`, and the token `end` if the text may end in `state`."""
    raise NotImplementedError("TODO e23.1: the mask, and the end of the text")


def forced(automaton: Any, alive: set[int], state: int) -> bytes:
    """Return the bytes that every text has to continue with from `state`."""
    raise NotImplementedError("TODO e23.1: as long as there is one way on and no end")
