"""One flag per slot, text or pad; the rest is read off the flags.

The flags cannot be recovered from the ids, for a text may contain the pad's id. Positions count
flags, the mask asks for the flag of the key, and what is wasted is a count of False.

A slot always sees itself, pad or not, so no softmax is over nothing. That costs nothing: no text
looks at a pad, so it does not matter what comes out of one.

Positions matter here because the model of the checks has a table of them. In a model that rotates
queries and keys only their differences count, and a row whose positions are all too large by its
number of pads gives the same output. The mistake then stays unseen until a row is computed once in
this batch and once in another, and its cached keys do not fit.
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
