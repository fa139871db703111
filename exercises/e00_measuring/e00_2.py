"""e00.2: compare two programs on a machine that does not hold still. The task is in README.md."""

from collections.abc import Callable


def compare(
    a: Callable[[], object], b: Callable[[], object], clock: Callable[[], float], blocks: int
) -> float:
    """Return how many times as long as b the program a takes.

    Args:
        a: runs the first program once and returns when its work is done.
        b: runs the second program once and returns when its work is done.
        clock: returns the time.
        blocks: a and b may run at most ``4 * blocks`` times in total.
    """
    raise NotImplementedError("TODO e00.2: choose an order of runs, and the quotients to compute")
