"""What the client records of one request."""

from dataclasses import dataclass, field
from typing import Any

REJECTED = (429, 503)  # the server refuses the request because it is overloaded
OK, REJECTION, FAILURE = "ok", "rejected", "failed"


@dataclass
class Reply:
    """One request and what came back; times are seconds on the clock of the event loop.

    Attributes:
        intended: when the request was due. Latencies count from here, so that a client or server
            that falls behind shows as latency (no coordinated omission).
        sent: when the client began to send it.
        end: when the reply was complete, or failed.
        frames: arrivals of frames that have choices, with or without text.
        texts: arrivals of frames that have text.
        error: one sentence; None if the request succeeded.
    """

    index: int
    turn: int
    intended: float
    sent: float = 0.0
    end: float = 0.0
    status: int | None = None
    error: str | None = None
    frames: list[float] = field(default_factory=list)
    texts: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""

    @property
    def outcome(self) -> str:
        """ok, rejected (429 or 503) or failed."""
        if self.error is None:
            return OK
        return REJECTION if self.status in REJECTED else FAILURE

    @property
    def tokens(self) -> int:
        """Output tokens by the server's usage; without usage, frames that have text."""
        return len(self.texts) if self.output_tokens is None else self.output_tokens

    @property
    def lateness(self) -> float:
        """Seconds that the client sent the request after it was due."""
        return self.sent - self.intended


COLUMNS = ("index", "turn", "intended", "sent", "end", "outcome", "status", "error",
           "prompt_tokens", "output_tokens", "cached_tokens", "finish_reason", "frames_us",
           "without_text")  # fmt: skip


def row(reply: Reply, start: float) -> list[Any]:
    """The reply as a row of JSON: seconds from the start of the run; frames in microseconds after
    sending; positions of the frames without text."""
    textual = set(reply.texts)
    return [
        reply.index,
        reply.turn,
        *(round(time - start, 6) for time in (reply.intended, reply.sent, reply.end)),
        reply.outcome,
        reply.status,
        reply.error,
        reply.prompt_tokens,
        reply.output_tokens,
        reply.cached_tokens,
        reply.finish_reason,
        [round(1e6 * (time - reply.sent)) for time in reply.frames],
        [place for place, time in enumerate(reply.frames) if time not in textual],
    ]
