"""The client records exact arrival times, usage and errors of a scripted server."""

import asyncio
from typing import Any

import pytest

from minillm.errors import ConfigError, NodeError
from minillm.lab.benchmarks.serving.client import Client, Fields, message_of, record
from minillm.lab.benchmarks.serving.reply import Reply
from minillm.lab.benchmarks.serving.target import find_target, find_vocabulary, key_headers, session
from tests.serving.load_fake import FakeServer, data, piece, running
from tests.serving.virtual_time import run_virtual

DONE = b"data: [DONE]\n\n"
USAGE = data({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})


async def request(server: FakeServer, chat: bool = False, timeout: float = 50.0) -> Reply:
    """The reply to one request of three tokens."""
    async with running(server) as url, session() as http:
        reply = Reply(0, 0, asyncio.get_running_loop().time())
        path = "/v1/chat/completions" if chat else "/v1/completions"
        prompt = [{"role": "user", "content": "a b"}] if chat else "a b"
        await Client(http, url, timeout, {}).send(reply, path, Fields("m", chat).body(prompt, 3))
        return reply


def scripted(*chunks: tuple[float, bytes]) -> Reply:
    """The reply to a server that sends these chunks."""
    found: Reply = run_virtual(request(FakeServer(script=list(chunks))))
    return found


def since(reply: Reply, times: list[float]) -> list[float]:
    return [at - reply.intended for at in times]


@pytest.mark.parametrize("chat", [False, True])
def test_frames_arrive_on_the_schedule(chat: bool) -> None:
    reply = run_virtual(request(FakeServer(ttft=0.25, itl=0.04), chat))
    assert reply.error is None
    assert since(reply, reply.frames) == pytest.approx([0.25, 0.29, 0.33], abs=1e-6)
    assert reply.texts == reply.frames
    assert reply.end - reply.intended == pytest.approx(0.33, abs=1e-6)
    assert (reply.output_tokens, reply.cached_tokens, reply.finish_reason) == (3, 1, "length")
    assert reply.text == " w0 w1 w2"


def test_empty_frames_comments_and_line_ends() -> None:
    role = data({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    windows = data(piece("b", "stop", chat=True)).replace(b"\n", b"\r\n")
    reply = scripted(
        (0.1, b": keep-alive\n\n"), (0.2, role), (0.3, data(piece("a", chat=True))),
        (0.4, windows), (0.6, USAGE + DONE),
    )  # fmt: skip
    assert reply.error is None
    assert since(reply, reply.frames) == pytest.approx([0.2, 0.3, 0.4], abs=1e-6)
    assert since(reply, reply.texts) == pytest.approx([0.3, 0.4], abs=1e-6)
    assert reply.end - reply.intended == pytest.approx(0.6, abs=1e-6)
    assert (reply.prompt_tokens, reply.output_tokens, reply.text) == (7, 3, "ab")


def test_data_without_a_space_and_without_a_final_line_end() -> None:
    reply = scripted((0.1, b'data:{"choices":[{"text":"a","finish_reason":"stop"}]}'))
    assert reply.error is None
    assert reply.text == "a"


@pytest.mark.parametrize(("chunks", "error"), [
    ([data(piece("a")), data({"error": {"message": "out of memory"}}), DONE], "out of memory"),
    ([data(piece("a"))], "ended without"), ([DONE], "no tokens"),
    ([data(piece("a", "stop")), b"data: {broken\n\n", DONE], "not valid"),
    ([b"data: 3\n\n", DONE], "not valid"), ([data({"choices": [3]}), DONE], "not valid"),
])  # fmt: skip
def test_broken_streams_have_failed(chunks: list[bytes], error: str) -> None:
    reply = Reply(0, 0, 0.0, status=200)
    record(reply, [(float(place), chunk) for place, chunk in enumerate(chunks)])
    assert error in (reply.error or "")
    assert reply.outcome == "failed"


@pytest.mark.parametrize(("server", "status", "outcome", "error"), [
    (FakeServer(refuse_above=0), 503, "rejected", "overloaded"),
    (FakeServer(refuse_above=0, refusal=429), 429, "rejected", "overloaded"),
    (FakeServer(break_if=lambda number: True), 500, "failed", "broken on purpose"),
])  # fmt: skip
def test_refusals_and_errors(server: FakeServer, status: int, outcome: str, error: str) -> None:
    reply = run_virtual(request(server))
    assert (reply.status, reply.outcome, reply.error) == (status, outcome, error)


def test_a_request_that_takes_too_long_has_failed() -> None:
    reply = run_virtual(request(FakeServer(ttft=9.0), timeout=5.0))
    assert "within 5 seconds" in reply.error
    assert reply.outcome == "failed"
    assert reply.end - reply.intended == pytest.approx(5.0, abs=1e-6)


def test_a_server_that_is_gone() -> None:
    async def gone() -> Reply:
        async with running(FakeServer()) as url:
            pass
        async with session() as http:
            reply = Reply(0, 0, 0.0)
            await Client(http, url, 5.0, {}).send(reply, "/v1/completions", b"{}")
            return reply

    reply = asyncio.run(gone())
    assert reply.outcome == "failed"
    assert reply.status is None
    assert reply.error == "Connection refused"


@pytest.mark.parametrize(("body", "message"), [
    (b'{"error": {"message": "no"}}', "no"), (b'{"error": "Unauthorized"}', "Unauthorized"),
    (b'{"detail": "Not Found"}', "Not Found"),
    (b"<html>\nbad gateway</html>", "<html> bad gateway</html>"), (b"", ""),
])  # fmt: skip
def test_messages_of_errors(body: bytes, message: str) -> None:
    assert message_of(body) == message


def find(server: FakeServer, name: str | None = None, key: str | None = None) -> Any:
    async def main() -> Any:
        async with running(server) as url, session() as http:
            target = await find_target(http, url, key_headers(key), name)
            return target, await find_vocabulary(http, target, key_headers(key), 0)

    return asyncio.run(main())


def test_the_server_says_what_it_serves() -> None:
    target, vocabulary = find(FakeServer(key="secret"), "fake", "secret")
    assert (target.model, target.root, target.longest) == ("fake", "fake-root", 4096)
    assert vocabulary.exact
    assert all("x" not in word for word in vocabulary.words)
    assert find(FakeServer(tokenizes=False))[1].exact is False
    assert find(FakeServer(max_model_len=None))[0].longest is None


def test_a_wrong_model_key_or_address_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'fake'"):
        find(FakeServer(), "fakes")
    with pytest.raises(NodeError, match="--api-key"):
        find(FakeServer(key="secret"))

    async def elsewhere(path: str) -> None:
        async with running(FakeServer()) as url, session() as http:
            await find_target(http, url + path, {}, None)

    with pytest.raises(NodeError, match="no OpenAI-compatible server"):
        asyncio.run(elsewhere("/other"))

    async def unreachable() -> None:
        async with session() as http:
            await find_target(http, "http://127.0.0.1:1", {}, None)

    with pytest.raises(NodeError, match="No server answers"):
        asyncio.run(unreachable())
