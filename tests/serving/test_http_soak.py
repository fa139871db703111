"""The server under a hundred clients at a time that finish, leave, read slowly or are killed.

What a client has received is compared with `LLM.generate`. Afterwards no block, request or task of
the server may be left, and memory may grow by at most `MOST_GROWTH`.
"""

import asyncio
import gc
import json
import random
import socket
import time
from collections import Counter

import pytest

from minillm import LLM, AsyncLLMEngine, SamplingParams
from minillm.api.arguments import AsyncEngineArgs
from minillm.scheduling.data_parallel import schedulers_of
from minillm.serving.settings import Settings
from tests.engine.test_soak import resident_bytes
from tests.serving.http_small import Served

KINDS = ("finish", "leave", "slow", "killed", "whole")
PROMPTS = ("def fib(n):", "import numpy as np\n", "class Tree:\n", "for i in range(", "# sort\n")
LINGER = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # close with a reset, as the system does for a kill
MOST_GROWTH = 4_000_000  # bytes after the first part, in about 1,000 requests: 4 kB of each
TOKENS = 48


class Soak:
    """A server, and clients that start again until the time is over."""

    def __init__(self, streams: int):
        options = {"dtype": "float32", "deterministic": True, "max_model_len": 128}
        with LLM("tiny", **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
            outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
        self.right = {
            prompt: each.outputs[0].text for prompt, each in zip(PROMPTS, outputs, strict=True)
        }
        args = AsyncEngineArgs("tiny", max_num_seqs=64, disable_log_stats=True, **options)  # type: ignore[arg-type]
        settings = Settings(names=("soak",), max_waiting=streams)
        self.server = Served(AsyncLLMEngine(args), settings)
        self.rng, self.streams, self.outcomes = random.Random(0), streams, Counter[str]()
        self.characters = 0
        self.rss: list[int] = []

    def run(self, seconds: float, parts: int) -> None:
        """Run for a time, in parts, and check that nothing is left after each."""
        try:
            for _ in range(parts):
                asyncio.run(self._clients(seconds / parts))
                self._check_idle()
        finally:
            self.server.stop()

    async def _clients(self, seconds: float) -> None:
        end = time.monotonic() + seconds

        async def client() -> None:
            await asyncio.sleep(self.rng.random())
            while time.monotonic() < end:
                await self._request(self.rng.choice(KINDS), self.rng.choice(PROMPTS))

        async with asyncio.timeout(seconds + 600), asyncio.TaskGroup() as group:
            for _ in range(self.streams):
                group.create_task(client())

    async def _request(self, kind: str, prompt: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=4096)
        body = json.dumps({"prompt": prompt, "temperature": 0, "max_tokens": TOKENS,
                           "ignore_eos": True, "stream": kind != "whole"}).encode()  # fmt: skip
        head = f"POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        got, most = b"", self.rng.randrange(4000)
        try:
            while part := await reader.read(512 if kind == "slow" else 65536):
                got += part
                if kind in ("leave", "killed") and len(got) > most:
                    break
                if kind == "slow":
                    await asyncio.sleep(0.01)
        finally:
            if kind == "killed":
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
            writer.close()
        self._check(kind, prompt, got)

    def _check(self, kind: str, prompt: str, got: bytes) -> None:
        status, right, leaves = got[9:12], self.right[prompt], kind in ("leave", "killed")
        self.outcomes[f"{kind}, {status.decode()}"] += 1
        data = without_chunks(got)
        if status != b"200":
            assert leaves or status == b"503", got[:300]
            return
        if kind == "whole":
            text, whole = json.loads(data)["choices"][0]["text"], True
        else:
            frames = data.split(b"\n\n")[:-1]
            whole = frames[-1:] == [b"data: [DONE]"]
            events = [json.loads(each[6:]) for each in frames if each.startswith(b"data: {")]
            text = "".join(each["choices"][0]["text"] for each in events)
        assert right.startswith(text), "another text"
        assert whole or leaves, f"cut off: {data[-300:]!r}"
        assert not whole or text == right, "a shorter text"
        self.characters += len(text)

    def _check_idle(self) -> None:
        engine, end = self.server.engine, time.monotonic() + 30
        while self.server.parts.gate.num_open or engine.num_unfinished:
            assert time.monotonic() < end, "sequences are left"
            time.sleep(0.05)
        time.sleep(0.5)  # connections that are being closed
        pool = schedulers_of(engine._engine.scheduler)[0].blocks.pool
        assert pool.num_free == pool.num_blocks, "blocks are left"
        engine._engine.trace.clear()  # its records may take 35 MB, which is no leak
        assert self.server.loop is not None
        assert len(asyncio.all_tasks(self.server.loop)) <= 4, "tasks are left"
        gc.collect()
        self.rss.append(resident_bytes())


def without_chunks(reply: bytes) -> bytes:
    """The body of a reply, of which the last chunk may be incomplete."""
    head, _, rest = reply.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return rest
    body = b""
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


@pytest.mark.slow
def test_many_streams_leave_nothing_behind() -> None:
    soak = Soak(streams=100)
    soak.run(20, parts=8)
    assert soak.outcomes.total() >= 800
    assert {each.partition(",")[0] for each in soak.outcomes} == set(KINDS)
    assert soak.characters > 10_000
    assert soak.rss[-1] - soak.rss[0] <= MOST_GROWTH, soak.rss


@pytest.mark.mutation
def test_the_soak_finds_another_text() -> None:
    soak = Soak(streams=1)
    soak.right = dict.fromkeys(soak.right, "something else")
    with pytest.raises(ExceptionGroup) as found:
        soak.run(3, parts=1)
    assert "another text" in str(found.value.exceptions[0])
