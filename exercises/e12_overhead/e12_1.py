"""e12.1: graphs for a few batch sizes. The task is in README.md."""

from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """The row of one request in a step."""

    token: int  # the token to compute; later tokens of this text read it
    slot: int  # the slot of the cache to write to; -1 for none
    table: int  # the number of the list of slots of this text
    length: int  # how many of these slots are read, its own included; 0 for none


class Device:
    """A device for your own tests. The device of the checks has the same methods, and counts."""

    def __init__(self, num_slots: int, tables: list[list[int]]) -> None:
        self.cache = [0] * num_slots
        self.tables = tables
        self.graphs: list[tuple[int, list[list[int]]]] = []

    def buffer(self, rows: int) -> list[int]:
        """Return memory for `rows` numbers, whose first contents are arbitrary."""
        return [1] * rows

    def capture(
        self,
        size: int,
        tokens: list[int],
        slots: list[int],
        tables: list[int],
        lengths: list[int],
        out: list[int],
    ) -> int:
        """Run and record the step over the first `size` rows; return the number of the graph."""
        self.graphs.append((size, [tokens, slots, tables, lengths, out]))
        self.replay(len(self.graphs) - 1)
        return len(self.graphs) - 1

    def replay(self, graph: int) -> None:
        """Run the recorded step over the current contents of its buffers, with one launch."""
        size, (*inputs, out) = self.graphs[graph]
        out[:size] = self.eager([Row(*row) for row in zip(*inputs, strict=True)][:size])

    def eager(self, rows: Sequence[Row]) -> list[int]:
        """Run the step without a graph; return one token for each row."""
        for row in rows:
            if row.slot >= 0:
                self.cache[row.slot] = row.token
        texts = [[self.cache[slot] for slot in self.tables[r.table][: r.length]] for r in rows]
        return [sum((at + 1) * token for at, token in enumerate(text)) % 997 for text in texts]


class Decoder:
    """Runs decode steps as graphs of a few sizes, which share one set of buffers."""

    def __init__(self, device: Device, sizes: Sequence[int]) -> None:
        """Make the buffers and capture a graph for each of `sizes`, which are ascending."""
        raise NotImplementedError("TODO e12.1: make the buffers, then capture the graphs")

    def step(self, rows: Sequence[Row]) -> list[int]:
        """Return one token for each of `rows`, with as few launches as possible."""
        raise NotImplementedError("TODO e12.1: fill the buffers, replay a graph, take the tokens")
