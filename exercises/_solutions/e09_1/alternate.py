"""Without a tree: the longest texts in a sorted list, from which the edges can be computed.

In dictionary order, a new text has its longest common prefix with one of its two neighbours, so a
binary search finds the match. A text that is a prefix of another is not stored; a text that
continues a stored one replaces it. An edge ends where a text differs from another, and equal
prefixes are counted once.
"""

from bisect import bisect_left
from itertools import pairwise
from operator import itemgetter

Text = tuple[int, ...]


def common_length(one: Text, other: Text) -> int:
    """How many of the first tokens of two texts are equal."""
    parts = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(parts, min(len(one), len(other)))


class RadixTree:
    """Texts and the slots of their keys and values: per salt a sorted list of (text, slots)."""

    def __init__(self) -> None:
        """No texts."""
        self.texts: dict[str, list[tuple[Text, Text]]] = {}

    def insert(self, tokens: list[int], slots: list[int], salt: str) -> int:
        """Store a text; return how many of its tokens were stored already and keep their slots."""
        known = self.match(tokens, salt, False)
        text, kept = tuple(tokens), self.texts.setdefault(salt, [])
        if len(known) < len(text):
            place = bisect_left(kept, text, key=itemgetter(0))
            if place and kept[place - 1][0] == text[: len(kept[place - 1][0])]:
                place -= 1
                kept.pop(place)  # the new text begins with it
            kept.insert(place, (text, (*known, *slots[len(known) :])))
        return len(known)

    def match(self, tokens: list[int], salt: str, sampling: bool) -> list[int]:
        """The slots of the longest start of `tokens` that is kept, one per token."""
        text, kept = tuple(tokens), self.texts.get(salt, [])
        place = bisect_left(kept, text, key=itemgetter(0))
        starts = [
            slots[: common_length(text, other)]
            for other, slots in kept[max(0, place - 1) : place + 1]
        ]
        best = max(starts, key=len, default=())
        return list(best[: len(text) - sampling])

    def edges(self, salt: str) -> list[list[int]]:
        """Return the tokens of every edge of this salt's tree, sorted."""
        texts = [text for text, _ in self.texts.get(salt, [])]
        ends = {}  # an edge, by the whole text up to its end
        for text in texts:
            cuts = {0, *(common_length(text, other) for other in texts)}
            ends.update(
                {text[:end]: list(text[start:end]) for start, end in pairwise(sorted(cuts))}
            )
        return sorted(ends.values())
