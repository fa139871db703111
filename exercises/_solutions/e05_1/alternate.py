"""Another way: one grid of cells (id, is it text); the three tables are computed from it.

A cell never changes, and `append` adds one to each row. The tables are properties, which are
computed when they are read, so they cannot be out of date. A pad sees only itself, which is always
one slot. Its position is the number of text tokens before it, as for text: 0 for the first pads,
and less than the number of slots for the pads after a text.
"""

from itertools import accumulate

Cell = tuple[int, bool]


class Batch:
    """Texts in rows of equal length, pads on the left."""

    def __init__(self, prompts: list[list[int]], pad: int) -> None:
        """Make one row per prompt, as long as the longest prompt."""
        self.blank: Cell = (pad, False)
        self.grid: list[list[Cell]] = [[(token, True) for token in prompt] for prompt in prompts]
        longest = max(map(len, prompts), default=0)
        for row in self.grid:
            row[:0] = [self.blank] * (longest - len(row))

    def append(self, tokens: list[int | None]) -> None:
        """Add one slot: the next token of each row, or a pad if the row has ended (None)."""
        for row, token in zip(self.grid, tokens, strict=True):
            row.append(self.blank if token is None else (token, True))

    def wasted(self) -> tuple[int, int]:
        """Return the number of slots that hold a pad, and the number of all slots."""
        text = [is_text for row in self.grid for _, is_text in row]
        return text.count(False), len(text)

    @property
    def ids(self) -> list[list[int]]:
        """The token in each slot of each row."""
        return [[token for token, _ in row] for row in self.grid]

    @property
    def positions(self) -> list[list[int]]:
        """How many text tokens stand before each slot."""
        return [list(accumulate((int(t) for _, t in row[:-1]), initial=0)) for row in self.grid]

    @property
    def mask(self) -> list[list[list[bool]]]:
        """Whether slot q may see slot k: text up to itself; a pad sees itself."""
        return [
            [
                [k <= q and sees if is_text else k == q for k, (_, sees) in enumerate(row)]
                for q, (_, is_text) in enumerate(row)
            ]
            for row in self.grid
        ]
