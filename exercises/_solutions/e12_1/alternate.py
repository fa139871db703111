"""Another way: sizes from the largest down, and buffers that are padding whenever nobody uses them.

The sizes come from a recursion over what is left: below a chosen size, the next one is some smaller
size that was seen, and all between the two is padded. The buffers are cleaned behind a step instead
of before the next one.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any


def choose(seen: Mapping[int, int], captures: int) -> list[int]:
    """At most `captures` sizes, ascending, that hold every batch of `seen` and pad the least."""
    order = sorted(seen)

    @cache
    def best(top: int, left: int) -> tuple[int, tuple[int, ...]]:
        """Padding and sizes for the batches up to order[top], which is one of `left` sizes."""
        rows = order[top]
        options = []
        for below in range(-1, top):
            cost = sum(seen[n] * (rows - n) for n in order[below + 1 : top])
            if below < 0:
                options.append((cost, (rows,)))
            elif left > 1:
                rest, sizes = best(below, left - 1)
                options.append((cost + rest, (*sizes, rows)))
        return min(options, key=lambda option: (option[0], len(option[1])))

    return list(best(len(order) - 1, captures)[1])


class Decoder:
    """Decode steps as graphs of a few sizes, which share one set of buffers."""

    def __init__(self, device: Any, sizes: Sequence[int]) -> None:
        """Everything is padding at first."""
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
        """Nobody's row."""
        self.token[at] = 0
        self.slot[at] = -1
        self.length[at] = 0

    def step(self, rows: Sequence[Any]) -> list[int]:
        """One replay, and the places are padding again."""
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
