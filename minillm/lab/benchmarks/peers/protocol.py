"""How a benchmark talks with an engine in a process of its own: one JSON object per line.

Requests: ``{"do": "open", ...}`` answers with facts about the engine; ``{"do": "steps", "prompts":
[[ids]], "new_tokens": n}`` with the time of every step; ``{"do": "offline", "prompts": ...,
"new_tokens": [n, ...]}`` with the seconds of all together. Answers are ``{"ok": ...}`` or
``{"error": sentence}``.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TextIO

PR_SET_PDEATHSIG = 1


class Timeline:
    """When each step of a batch ended, and what it brought.

    A row is (seconds since the start, new tokens, sequences that have their first token,
    sequences that are complete).
    """

    def __init__(self, lengths: Sequence[int], clock: Callable[[], float] = time.perf_counter):
        self._left = list(lengths)
        self._started = [False] * len(self._left)
        self._clock = clock
        self._start = clock()
        self.rows: list[tuple[float, int, int, int]] = []

    @property
    def done(self) -> bool:
        """Whether every sequence has all its tokens."""
        return not any(self._left)

    def step(self, new: Iterable[tuple[int, int]]) -> None:
        """A step ended that brought (sequence, tokens) pairs."""
        now, count = self._clock() - self._start, 0
        for index, tokens in new:
            if tokens > self._left[index]:
                raise RuntimeError(f"sequence {index} got more tokens than were asked for")
            self._left[index] -= tokens
            self._started[index] |= tokens > 0
            count += tokens
        if count:
            complete = sum(not left for left in self._left)
            self.rows.append((now, count, sum(self._started), complete))


class Engine(Protocol):
    """What a file of this folder provides as ``Worker``."""

    def open(self, options: dict[str, Any]) -> dict[str, Any]:
        """Load the model; the answer says which version runs in which precision."""

    def steps(self, prompts: list[list[int]], new_tokens: int) -> Timeline:
        """Generate exactly so many tokens for each prompt, all together."""

    def offline(self, prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
        """The same with a length per prompt, as the engine does it best by itself."""


def serve(engine: Engine, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are no more."""
    for line in requests:
        try:
            answer: dict[str, Any] = {"ok": answer_to(engine, json.loads(line))}
        except Exception as error:
            text = " ".join(str(error).split())[-500:]
            answer = {"error": f"{type(error).__name__}: {text}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def answer_to(engine: Engine, request: dict[str, Any]) -> Any:
    """Do what one request asks."""
    start = time.perf_counter()
    what = request.pop("do")
    if what == "open":
        facts = engine.open(request)
        return {"seconds": time.perf_counter() - start, **facts}
    if what == "steps":
        return engine.steps(request["prompts"], request["new_tokens"]).rows
    if what == "offline":
        facts = engine.offline(request["prompts"], request["new_tokens"])
        return {"seconds": time.perf_counter() - start, **facts}
    raise ValueError(f"there is no request {what!r}")


def private_stdout() -> TextIO:
    """The standard output for answers only: whatever libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def end_with_parent() -> None:
    """Ask Linux to end this process when its parent ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
