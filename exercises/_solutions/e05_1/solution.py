"""One bool per slot, text or pad; all tables follow from these bools.

The bools cannot be recovered from the ids, because a text may contain the pad's id. A position
counts them, the mask asks for the bool of the key, and `wasted` counts those that are False.

A slot always sees itself, pad or not, so every softmax is over at least one slot. This changes no
text, because no text sees a pad.

Positions matter here because the model of the checks has a table of positions. In a model that
rotates queries and keys, only differences of positions count. If all positions of a row are too
large by its number of pads, the output is the same, and the mistake shows only when the cached keys
of this batch are used in another batch.
"""


class Batch:
    """Texts of different lengths in rows of equal length, with pads on the left."""

    def __init__(self, prompts: list[list[int]], pad: int) -> None:
        """Make one row per prompt, as long as the longest prompt."""
        self.pad = pad
        size = max(map(len, prompts))
        self.text = [[False] * (size - len(prompt)) + [True] * len(prompt) for prompt in prompts]
        self.ids = [[pad] * (size - len(prompt)) + prompt for prompt in prompts]

    def append(self, tokens: list[int | None]) -> None:
        """Add one slot: the next token of each row, or a pad if the row has ended (None)."""
        for row, token in enumerate(tokens):
            self.text[row].append(token is not None)
            self.ids[row].append(self.pad if token is None else token)

    @property
    def positions(self) -> list[list[int]]:
        """The number of text tokens before each slot."""
        return [[sum(text[:slot]) for slot in range(len(text))] for text in self.text]

    @property
    def mask(self) -> list[list[list[bool]]]:
        """Text up to the query, and the query's own slot."""
        return [self._seen(text) for text in self.text]

    def _seen(self, text: list[bool]) -> list[list[bool]]:
        slots = range(len(text))
        return [[key == query or (text[key] and key < query) for key in slots] for query in slots]

    def wasted(self) -> tuple[int, int]:
        """Return the number of slots that hold a pad, and the number of all slots."""
        flags = [flag for text in self.text for flag in text]
        return flags.count(False), len(flags)
