"""One function decides what a row that nobody asked for does, and all steps go through it.

The graph cannot be told how many of its rows are real, so the rows have to say it themselves: a
slot of -1 and a length of 0 make a row that costs a little time and touches nothing. It is written
behind the real rows in every step, for what stood there belongs to a batch of some time ago, whose
slots have other owners now. The same padding, in all rows, makes capturing harmless.

The sizes never have to be other ones than those that were seen: a smaller bucket that still holds
the same batches pads less. An engine does not know tomorrow's batches, so it captures a ladder:
1, 2, 4, 8, 16, 24, 32 and on in steps of 8. Two things hold on it whatever comes: never more than
7 rows are padding, and never half of them. The largest is captured first, and all others find its
memory large enough.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

PADDING = (0, -1, 0, 0)  # any token, written nowhere, any table, of which nothing is read


def bucket(sizes: Sequence[int], rows: int) -> int:
    """The smallest of the ascending `sizes` into which `rows` rows fit."""
    return sizes[bisect_left(sizes, rows)]


def padded(seen: Mapping[int, int], sizes: Sequence[int]) -> int:
    """How many rows are padding when all steps of `seen` have been run."""
    return sum(times * (bucket(sizes, rows) - rows) for rows, times in seen.items())


def choose(seen: Mapping[int, int], captures: int) -> list[int]:
    """At most `captures` sizes, ascending, that hold every batch of `seen` and pad the least."""
    *smaller, largest = sorted(seen)
    count = min(captures - 1, len(smaller))
    sets = ([*some, largest] for some in combinations(smaller, count))
    return min(sets, key=lambda sizes: padded(seen, sizes))


class Decoder:
    """Decode steps as graphs of a few sizes, which share one set of buffers."""

    def __init__(self, device: Any, sizes: Sequence[int]) -> None:
        """One buffer for each field of a row and one for the tokens; the largest graph first."""
        self.device, self.sizes = device, list(sizes)
        self.inputs = [device.buffer(sizes[-1]) for _ in PADDING]
        self.out = device.buffer(sizes[-1])
        self.fill([], sizes[-1])
        self.graphs = {}
        for size in reversed(self.sizes):
            self.graphs[size] = device.capture(size, *self.inputs, self.out)

    def fill(self, rows: Sequence[tuple[int, ...]], size: int) -> None:
        """Write `rows` into the buffers, and padding behind them, up to `size` rows."""
        table = [*rows, *[PADDING] * (size - len(rows))]
        for buffer, column in zip(self.inputs, zip(*table, strict=True), strict=True):
            buffer[:size] = column

    def step(self, rows: Sequence[tuple[int, ...]]) -> list[int]:
        """The tokens of one step: a replay if the rows fit into a graph."""
        if not rows:
            return []
        if len(rows) > self.sizes[-1]:
            return self.device.eager(rows)
        size = bucket(self.sizes, len(rows))
        self.fill(rows, size)
        self.device.replay(self.graphs[size])
        return self.out[: len(rows)]
