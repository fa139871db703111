"""A streaming client of /v1/completions and /v1/chat/completions.

During a request only arrival times are recorded; frames are parsed after its end, so that parsing
does not delay the next frame. The length of a request is limited by `Client.timeout`.
"""

import asyncio
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minillm.lab.benchmarks.serving.reply import Reply

if TYPE_CHECKING:
    import aiohttp

PATHS: Mapping[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LONGEST_ERROR = 300  # characters of a server's message
MOST_ERROR_BYTES = 65536


@dataclass(frozen=True)
class Client:
    """A session and what all requests to one server have in common."""

    session: "aiohttp.ClientSession"
    url: str
    timeout: float
    headers: Mapping[str, str]

    async def send(self, reply: Reply, path: str, body: bytes) -> None:
        """Send one request and record its reply; errors are recorded, too."""
        import aiohttp

        clock = asyncio.get_running_loop().time
        chunks: list[tuple[float, bytes]] = []
        reply.sent = clock()
        headers = {"Content-Type": "application/json", **self.headers}
        try:
            async with asyncio.timeout(self.timeout):
                post = self.session.post(self.url + path, data=body, headers=headers)
                async with post as response:
                    reply.status = response.status
                    if response.status == 200:
                        async for chunk in response.content.iter_any():
                            chunks.append((clock(), chunk))
                    else:
                        text = await response.content.read(MOST_ERROR_BYTES)
                        reply.error = message_of(text) or f"HTTP status {response.status}"
        except TimeoutError:
            reply.error = f"no complete reply within {self.timeout:g} seconds"
        except (aiohttp.ClientError, OSError) as error:
            reply.error = in_short(error)
        reply.end = clock()
        record(reply, chunks)


def in_short(error: Exception) -> str:
    """A network error in one line."""
    system = getattr(error, "os_error", error)  # aiohttp's connection errors have the system's
    code = getattr(system, "errno", None) or 0
    text = os.strerror(code) if code > 0 else getattr(system, "strerror", None) or str(error)
    text = " ".join(text.split())[:LONGEST_ERROR]
    return text or type(error).__name__


def message_of(body: bytes) -> str:
    """The message in an error's body: OpenAI's form, FastAPI's, or plain text."""
    try:
        data: Any = json.loads(body)
    except ValueError:
        return " ".join(body.decode("utf-8", "replace").split())[:LONGEST_ERROR]
    for key in ("error", "message", "detail"):
        if isinstance(data, dict) and data.get(key):
            data = data[key]
    return str(data)[:LONGEST_ERROR]


def lines_of(chunks: Iterable[tuple[float, bytes]]) -> Iterable[tuple[float, bytes]]:
    """Complete lines, each with the arrival time of its last byte."""
    rest = b""
    for arrival, chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield arrival, line
    if rest:
        yield arrival, rest


def record(reply: Reply, chunks: Iterable[tuple[float, bytes]]) -> None:
    """Parse the frames of a reply. A stream that ends without ``[DONE]`` and without a finish
    reason has failed, and so has one without any frame."""
    texts: list[str] = []
    done = False
    for arrival, line in lines_of(chunks):
        if not line.startswith(b"data:"):
            continue  # a comment, or the end of a frame
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        try:
            frame = json.loads(data)
            record_frame(reply, arrival, frame, texts)
        except (ValueError, TypeError, AttributeError, LookupError):
            reply.error = reply.error or "a frame of the stream is not valid"
    reply.text = "".join(texts)
    if reply.error is None and not reply.frames:
        reply.error = "the stream had no tokens"
    elif reply.error is None and not done and reply.finish_reason is None:
        reply.error = "the stream ended without [DONE]"


def record_frame(reply: Reply, arrival: float, frame: Mapping[str, Any], texts: list[str]) -> None:
    """Record one frame: an error, choices, or usage."""
    if frame.get("error"):
        reply.error = message_of(json.dumps(frame).encode())
    choices = frame.get("choices")
    if choices:
        reply.frames.append(arrival)
        choice = choices[0]
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("reasoning_content") or delta.get("content") or ""
        if text:
            reply.texts.append(arrival)
            texts.append(text)
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    usage = frame.get("usage")
    if usage:
        reply.prompt_tokens = usage.get("prompt_tokens")
        reply.output_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        reply.cached_tokens = details.get("cached_tokens")


@dataclass(frozen=True)
class Fields:
    """Fields of every request's body."""

    model: str
    chat: bool
    ignore_eos: bool = True

    def body(self, prompt: Any, max_tokens: int) -> bytes:
        """The JSON of one request. `prompt` is a text, a list of ids, or a list of messages."""
        data: dict[str, Any] = {
            "model": self.model,
            "messages" if self.chat else "prompt": prompt,
            "max_completion_tokens" if self.chat else "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            data["ignore_eos"] = True
        return json.dumps(data, separators=(",", ":")).encode()
