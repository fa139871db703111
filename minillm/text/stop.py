"""Find stop strings in text that arrives in pieces, without making the stream lag.

Each stop string is followed by its own Knuth-Morris-Pratt automaton (Knuth, Morris, Pratt, "Fast
pattern matching in strings", 1977): one number per string says how much of it the text now ends
with. So the work per character is constant, the way the text was cut into tokens cannot matter,
and exactly those characters are held back that may still turn out to be the start of a stop string.

    text so far   ........................|<- held ->|
                  already returned         ends like the start of a stop string
"""

from collections.abc import Sequence


class StopStrings:
    """The first completed stop string ends the text.

    The match is the one whose last character comes first; of several that end at the same
    character, the longest. That is vLLM's rule at one character per token, and, unlike
    vLLM's, it does not depend on how the text was cut into tokens or on the order of ``stops``.

    Args:
        stops: non-empty strings (``SamplingParams`` refuses the empty one).
        include_stop_str: whether the returned text keeps the stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop_str: bool = False) -> None:
        # Longest first: the first automaton that completes at a character is then the longest.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._include = include_stop_str
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text, None so far."""

    def push(self, text: str, may_stop: bool = True) -> str:
        """Take the next piece of text and return what can be shown now.

        Args:
            text: any piece, also an empty one.
            may_stop: False while ``min_tokens`` is not reached: a stop string completed inside this
                piece is then ordinary text (one that completes later may still begin in it).
        """
        if self.matched is not None or not text or not self._stops:
            return "" if self.matched is not None else text
        if not any(self._states) and self._firsts.isdisjoint(text):
            return text  # nothing has begun
        for position, char in enumerate(text):
            done = self._advance(char)
            if done is not None and may_stop:
                return self._finish(done, self._held + text[: position + 1])
        text = self._held + text
        keep = 0 if self._include else max(self._states)
        shown = len(text) - keep
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return what was held back; the text ends here."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Move every automaton by one character; return the longest stop string now complete."""
        done = None
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            state = self._states[i]
            while state and stop[state] != char:
                state = borders[state - 1]
            state += stop[state] == char
            if state == len(stop):
                done = done or stop
                state = borders[state - 1]
            self._states[i] = state
        return done

    def _finish(self, stop: str, text: str) -> str:
        self.matched, self._held = stop, ""
        return text if self._include else text[: len(text) - len(stop)]


def _borders(stop: str) -> list[int]:
    """``borders[i]``: length of the longest proper prefix of ``stop[:i+1]`` that is its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        length += stop[i] == stop[length]
        borders[i] = length
    return borders
