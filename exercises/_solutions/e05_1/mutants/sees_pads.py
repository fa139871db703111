"""Your mask is only causal: a text then sees the pads before it as if they were text."""


class Batch:
    """Texts of different lengths in rows of equal length, filled up with pads on the left."""

    def __init__(self, prompts: list[list[int]], pad: int) -> None:
        """One row per prompt, as long as the longest of them."""
        self.pad = pad
        size = max(map(len, prompts))
        self.text = [[False] * (size - len(prompt)) + [True] * len(prompt) for prompt in prompts]
        self.ids = [[pad] * (size - len(prompt)) + prompt for prompt in prompts]

    def append(self, tokens: list[int | None]) -> None:
        """One more slot: each row's next token, or a pad where the row has ended (None)."""
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
        return [[key <= query for key in slots] for query in slots]

    def wasted(self) -> tuple[int, int]:
        """How many slots hold a pad, and how many slots there are."""
        flags = [flag for text in self.text for flag in text]
        return flags.count(False), len(flags)
