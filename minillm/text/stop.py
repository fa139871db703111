"""Finds stop strings in streamed text, holding back as little text as possible.

The state is one integer with a bit for each character of each stop string (Shift-And: Baeza-Yates
and Gonnet, "A new approach to text searching", 1992): the bit is set if the text ends with the stop
string up to there. So the work per character is constant, the result does not depend on token
boundaries, and only characters that may be the start of a stop string are held back.

    text so far   ........................|<- held ->|
                  already returned         may be the start of a stop string
"""

from collections.abc import Sequence


class StopStrings:
    """Ends a text at the first completed stop string.

    The match is the stop string that is completed first, and the longest one if several are
    completed by the same character. This is vLLM's rule for tokens of one character. Unlike in
    vLLM, the match does not depend on token boundaries or on the order of ``stops``.

    Args:
        stops: non-empty strings.
        include_stop_str: whether the returned text includes the stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop_str: bool = False) -> None:
        # Longest first, so that the first one that is complete is the longest match.
        ordered = sorted(set(stops), key=len, reverse=True)
        self._stops = [(s, sum(map(len, ordered[:i]))) for i, s in enumerate(ordered)]  # first bits
        self._firsts = sum(1 << first for _, first in self._stops)
        self._bits: dict[str, int] = {}  # of each character
        for bit, char in enumerate("".join(ordered)):
            self._bits[char] = self._bits.get(char, 0) | 1 << bit
        self._state = 0
        self._include = include_stop_str
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text; None until then."""

    def push(self, text: str, may_stop: bool = True) -> str:
        """Add the next piece of text; return the text that can be shown now.

        Args:
            text: any piece; may be empty.
            may_stop: False until ``min_tokens`` is reached: a stop string completed in this piece
                is then ordinary text (one completed later may begin in it).
        """
        if self.matched is not None or not text or not self._stops:
            return "" if self.matched is not None else text
        if not self._state and self._bits.keys().isdisjoint(text):
            return text  # no stop string begins here
        for position, char in enumerate(text):
            self._state = (self._state << 1 | self._firsts) & self._bits.get(char, 0)
            for stop, first in self._stops if may_stop and self._state else ():
                if self._state >> first + len(stop) - 1 & 1:
                    return self._finish(stop, self._held + text[: position + 1])
        text = self._held + text
        keep = 0 if self._include else max(self._begun(*stops) for stops in self._stops)
        shown = len(text) - keep
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the text held back; the text ends here."""
        held, self._held = self._held, ""
        return held

    def _begun(self, stop: str, first: int) -> int:
        """The number of characters of a stop string, fewer than all, that the text ends with."""
        return (self._state >> first & (1 << len(stop) - 1) - 1).bit_length()

    def _finish(self, stop: str, text: str) -> str:
        self.matched, self._held = stop, ""
        return text if self._include else text[: len(text) - len(stop)]
