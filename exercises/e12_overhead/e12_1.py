"""e12.1: graphs for a few batch sizes. The task is in README.md."""

from collections.abc import Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """What one request brings into a step."""

    token: int  # which is computed, and read by whoever comes later in this text
    slot: int  # of the cache, where it is written; -1: nowhere
    table: int  # the number of the list of slots in which this text lies
    length: int  # how many of these slots are read, its own included; 0: none


class Device:
    """A device for your own trials. That of the checks has the same four methods, and counts."""

    def __init__(self, num_slots: int, tables: list[list[int]]) -> None:
        self.cache = [0] * num_slots
        self.tables = tables
        self.graphs: list[tuple[int, list[list[int]]]] = []

    def buffer(self, rows: int) -> list[int]:
        """Memory for `rows` numbers that stays where it is; anything may be in it at first."""
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
        """Run the step once over the first `size` rows of these buffers, record it; its number."""
        self.graphs.append((size, [tokens, slots, tables, lengths, out]))
        self.replay(len(self.graphs) - 1)
        return len(self.graphs) - 1

    def replay(self, graph: int) -> None:
        """One launch: the recorded step, over what is in its buffers now."""
        size, (*inputs, out) = self.graphs[graph]
        out[:size] = self.eager([Row(*row) for row in zip(*inputs, strict=True)][:size])

    def eager(self, rows: Sequence[Row]) -> list[int]:
        """The step without a graph, some hundred launches: one token for each row."""
        for row in rows:
            if row.slot >= 0:
                self.cache[row.slot] = row.token
        texts = [[self.cache[slot] for slot in self.tables[r.table][: r.length]] for r in rows]
        return [sum((at + 1) * token for at, token in enumerate(text)) % 997 for text in texts]


class Decoder:
    """Decode steps as graphs of a few sizes, which share one set of buffers."""

    def __init__(self, device: Device, sizes: Sequence[int]) -> None:
        """Make the buffers and capture a graph for each of `sizes`, which ascend."""
        raise NotImplementedError("TODO e12.1: buffers first, then the graphs")

    def step(self, rows: Sequence[Row]) -> list[int]:
        """The tokens of one step, one for each of `rows`, by as few launches as can be."""
        raise NotImplementedError("TODO e12.1: fill the buffers, replay a graph, take the tokens")
