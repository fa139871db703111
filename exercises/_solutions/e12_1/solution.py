"""One function writes the padding, and every step and every capture uses it.

A graph cannot be told how many of its rows are real, so each row has to say so itself. A slot of -1
and a length of 0 make a row that costs a little time, writes nothing and reads nothing. `fill`
writes such rows behind the real ones in every step, because the rows there are left from an earlier
batch, and their slots may belong to another text by now. A capture also runs the step once, so the
same padding, in all rows, makes capturing harmless.

The largest graph is captured first. Its scratch memory is large enough for all others.

Which sizes are worth a graph? An engine does not know tomorrow's batches, so it captures a ladder:
1, 2, 4, 8, 16, 24, 32 and on in steps of 8. On this ladder a batch has at most 7 rows of padding,
and always fewer rows of padding than real ones.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

PADDING = (0, -1, 0, 0)  # token 0 is not written; of table 0 nothing is read


def bucket(sizes: Sequence[int], rows: int) -> int:
    """The smallest of the ascending `sizes` into which `rows` rows fit."""
    return sizes[bisect_left(sizes, rows)]


class Decoder:
    """Runs decode steps as graphs of a few sizes, which share one set of buffers."""

    def __init__(self, device: Any, sizes: Sequence[int]) -> None:
        """Make a buffer for each field and for the tokens; capture the largest graph first."""
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
        """Return the tokens of one step, by a replay if the rows fit into a graph."""
        if not rows:
            return []
        if len(rows) > self.sizes[-1]:
            return self.device.eager(rows)
        size = bucket(self.sizes, len(rows))
        self.fill(rows, size)
        self.device.replay(self.graphs[size])
        return self.out[: len(rows)]
