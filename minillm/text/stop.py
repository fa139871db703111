"""Finds stop strings in streamed text, holding back as little text as possible.

Each stop string has a Knuth-Morris-Pratt automaton (Knuth, Morris, Pratt, "Fast pattern matching in
strings", 1977), whose state is the number of its characters that the text ends with. So the work
per character is constant, the result does not depend on token boundaries, and only characters that
may be the start of a stop string are held back.

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
        # Longest first, so that the first automaton that completes is the longest match.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
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
        if not any(self._states) and self._firsts.isdisjoint(text):
            return text  # no stop string begins here
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
        """Return the text held back; the text ends here."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Advance every automaton by one character; return the longest completed stop string."""
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
