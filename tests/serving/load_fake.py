"""A scripted OpenAI-compatible server for the tests of the load generator."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from minillm.lab.benchmarks.serving.bench import Bench, Plan
from minillm.lab.benchmarks.serving.client import Client, Fields
from minillm.lab.benchmarks.serving.prompts import WORDS, Vocabulary, Writer
from minillm.lab.benchmarks.serving.target import Target, session


def data(frame: Any) -> bytes:
    """An event."""
    return b"data: " + json.dumps(frame).encode() + b"\n\n"


def piece(text: str, finish: str | None = None, chat: bool = False) -> dict[str, Any]:
    """A frame with one choice."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": {"content": text}} if chat else {"text": text}
    return {"id": "x", "object": "text_completion", "choices": [choice]}


@dataclass
class FakeServer:
    """Replies with `max_tokens` frames on a schedule.

    Attributes:
        ttft, itl: seconds to the first frame and between frames.
        slots: requests that are served at once; others wait.
        refuse_above: requests in flight above which a request gets `refusal`.
        stall: the interval (after the start) in which nothing is sent.
        script: raw chunks with times after the request, in place of generated frames.
        break_if: requests, by their number, that get status 500.
    """

    ttft: float = 0.1
    itl: float = 0.02
    slots: int = 1_000_000
    refuse_above: int | None = None
    refusal: int = 503
    stall: tuple[float, float] = (0.0, 0.0)
    script: list[tuple[float, bytes]] | None = None
    break_if: Callable[[int], bool] = lambda number: False
    usage: bool = True
    tokenizes: bool = True
    max_model_len: int | None = 4096
    key: str | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    flying: int = 0
    most: int = 0

    def app(self) -> web.Application:
        """The routes."""
        self.places = asyncio.Semaphore(self.slots)
        self.start = asyncio.get_running_loop().time()
        made = web.Application()
        made.router.add_get("/v1/models", self.models)
        made.router.add_get("/health", self.models)
        made.router.add_post("/v1/completions", self.generate)
        made.router.add_post("/v1/chat/completions", self.generate)
        if self.tokenizes:
            made.router.add_post("/tokenize", self.tokenize)
        return made

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        model = {"id": "fake", "root": "fake-root", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [model]})

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize: a token per word; words with an x take two."""
        words = (await request.json())["prompt"].split()
        ids = [1000 + WORDS.index(word) for word in words for _ in range(1 + ("x" in word))]
        return web.json_response({"tokens": ids, "count": len(ids)})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A completion."""
        body = await request.json()
        number = len(self.seen)
        self.seen.append(body)
        self.times.append(asyncio.get_running_loop().time() - self.start)
        if self.break_if(number):
            return web.json_response({"error": {"message": "broken on purpose"}}, status=500)
        if self.refuse_above is not None and self.flying >= self.refuse_above:
            return web.json_response({"error": {"message": "overloaded"}}, status=self.refusal)
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            async with self.places:
                return await self.stream(request, body)
        finally:
            self.flying -= 1

    async def stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """The frames of one reply."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        began = asyncio.get_running_loop().time()
        for after, chunk in self.script if self.script is not None else self.frames(body):
            await self.until(began + after)
            await response.write(chunk)
        return response

    def frames(self, body: dict[str, Any]) -> list[tuple[float, bytes]]:
        """The schedule of a reply, with the usage at its end."""
        chat = "messages" in body
        count = body.get("max_tokens") or body.get("max_completion_tokens")
        found = []
        for number in range(count):
            finish = "length" if number == count - 1 else None
            after = self.ttft + number * self.itl
            found.append((after, data(piece(f" w{number}", finish, chat))))
        prompt = body.get("prompt", "")
        length = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        usage = {"prompt_tokens": length, "completion_tokens": count,
                 "prompt_tokens_details": {"cached_tokens": 1}}  # fmt: skip
        if self.usage:
            found.append((found[-1][0], data({"choices": [], "usage": usage})))
        return [*found, (found[-1][0], b"data: [DONE]\n\n")]

    async def until(self, due: float) -> None:
        """Wait for a time, and for the end of a stall."""
        loop = asyncio.get_running_loop()
        first, last = (self.start + each for each in self.stall)
        if first <= max(due, loop.time()) < last:
            due = last
        if due > loop.time():
            await asyncio.sleep(due - loop.time())


@asynccontextmanager
async def running(server: FakeServer) -> AsyncIterator[str]:
    """The server on a free port of the loopback interface; gives its address."""
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def bench_of(
    server: FakeServer, plan: Plan, chat: bool = False, ids: bool = True, timeout: float = 60.0
) -> AsyncIterator[Bench]:
    """A benchmark of the server, without polling of the clock."""
    async with running(server) as url, session() as http:
        target = Target(url, "fake", "fake", server.max_model_len, "")
        words = Vocabulary(ids=tuple(range(1000)), exact=True)
        writer = Writer(Fields("fake", chat), words, ids and not chat)
        client = Client(http, url, timeout, {})
        yield Bench(plan, target, client, writer, lambda text: None, polled=0.0)
