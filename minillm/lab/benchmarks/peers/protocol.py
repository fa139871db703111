"""The protocol between a benchmark and an engine's process: one JSON object per line.

Requests and their answers:

* ``{"do": "open", ...}``: facts about the engine.
* ``{"do": "steps", "prompts": [[ids]], "new_tokens": n}``: the time of every step.
* ``{"do": "offline", "prompts": ..., "new_tokens": [n, ...]}``: the total seconds.

An answer is ``{"ok": ...}`` or ``{"error": sentence}``.
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
    """The end time and progress of each step of a batch.

    A row is (seconds since the start, new tokens, sequences that have their first token, complete
    sequences).
    """

    def __init__(self, lengths: Sequence[int], clock: Callable[[], float] = time.perf_counter):
        self._left = list(lengths)
        self._started = [False] * len(self._left)
        self._clock = clock
        self._start = clock()
        self.rows: list[tuple[float, int, int, int]] = []

    @property
    def done(self) -> bool:
        """Whether all sequences are complete."""
        return not any(self._left)

    def step(self, new: Iterable[tuple[int, int]]) -> None:
        """Record the end of a step that yielded (sequence, number of tokens) pairs."""
        now, count = self._clock() - self._start, 0
        for index, tokens in new:
            if tokens > self._left[index]:
                raise RuntimeError(f"sequence {index} got more tokens than requested")
            self._left[index] -= tokens
            self._started[index] |= tokens > 0
            count += tokens
        if count:
            complete = sum(not left for left in self._left)
            self.rows.append((now, count, sum(self._started), complete))


class Engine(Protocol):
    """The interface of the class ``Worker`` in each file of this folder."""

    def open(self, options: dict[str, Any]) -> dict[str, Any]:
        """Load the model; returns the engine's version and precisions."""

    def steps(self, prompts: list[list[int]], new_tokens: int) -> Timeline:
        """Generate `new_tokens` tokens for each prompt in one batch."""

    def offline(self, prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
        """Generate with an output length per prompt, through the engine's usual offline API."""


def serve(engine: Engine, requests: TextIO, answers: TextIO) -> None:
    """Answer requests until the end of the input."""
    for line in requests:
        try:
            answer: dict[str, Any] = {"ok": answer_to(engine, json.loads(line))}
        except Exception as error:
            text = " ".join(str(error).split())[-500:]
            answer = {"error": f"{type(error).__name__}: {text}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def answer_to(engine: Engine, request: dict[str, Any]) -> Any:
    """Execute one request."""
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
    raise ValueError(f"there is no request {what!r}; use open, steps or offline")


def private_stdout() -> TextIO:
    """A private copy of standard output for answers; all other output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def end_with_parent() -> None:
    """On Linux, have the kernel end this process when its parent ends for any reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
