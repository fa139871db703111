"""e00.2: compare two programs on a machine that does not hold still. The task is in README.md."""

from collections.abc import Callable


def compare(
    a: Callable[[], object], b: Callable[[], object], clock: Callable[[], float], blocks: int
) -> float:
    """How many times as long as b does a take?

    Args:
        a: runs the first program once and returns when its work is done.
        b: runs the second program once and returns when its work is done.
        clock: returns the time.
        blocks: a and b may run ``4 * blocks`` times together, and no more.
    """
    raise NotImplementedError("TODO e00.2: in which order, and what do you divide by what?")
