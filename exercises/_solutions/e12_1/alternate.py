"""Another way: every row of the buffers is padding between two steps.

A step writes its rows, replays the graph, and turns the rows into padding again. So the buffers are
cleaned after a step instead of before the next one.
"""

from collections.abc import Sequence
from typing import Any


class Decoder:
    """Runs decode steps as graphs of a few sizes, which share one set of buffers."""

    def __init__(self, device: Any, sizes: Sequence[int]) -> None:
        """Make the buffers, all padding, and capture from the largest size to the smallest."""
        self.device = device
        rows = max(sizes)
        self.token, self.slot, self.table, self.length, self.out = (
            device.buffer(rows) for _ in range(5)
        )
        for at in range(rows):
            self.clean(at)
        buffers = (self.token, self.slot, self.table, self.length, self.out)
        self.graphs = [(size, device.capture(size, *buffers)) for size in sorted(sizes)[::-1]]
        self.graphs.reverse()

    def clean(self, at: int) -> None:
        """Turn a row into padding."""
        self.token[at] = 0
        self.slot[at] = -1
        self.length[at] = 0

    def step(self, rows: Sequence[Any]) -> list[int]:
        """Replay one graph, then turn its rows into padding again."""
        if len(rows) == 0:
            return []
        fitting = [graph for size, graph in self.graphs if size >= len(rows)]
        if not fitting:
            return list(self.device.eager(rows))
        for at, row in enumerate(rows):
            self.token[at], self.slot[at], self.table[at], self.length[at] = row
        self.device.replay(fitting[0])
        for at in range(len(rows)):
            self.clean(at)
        return [self.out[at] for at in range(len(rows))]
