"""Clients that leave, read slowly or send too much; drains; health; keys."""

import json
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from minillm.cli.serve import bound_socket
from minillm.serving import launch as server_module
from minillm.serving.guard import MAX_BODY
from minillm.serving.settings import Settings
from tests.pairs import pairwise
from tests.serving.http_small import Served, served, serving

ARGUMENTS = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
LONG = {"max_tokens": 50, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def paced(server: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Steps of 20 ms, so that a client can leave in the middle."""
    slow_steps(server, monkeypatch)
    return server


def request(server: Served, path: str, **fields: object) -> socket.socket:
    """Send a request, and return its connection."""
    return server.post(path, LONG | fields)


def reset(wire: socket.socket) -> None:
    """Close a connection as the system does for a killed process."""
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    wire.close()


def steps(server: Served) -> int:
    """Steps so far."""
    return server.engine.state().counters.num_steps


@pytest.mark.parametrize(
    ("phase", "path", "stream", "leave"),
    pairwise(
        ["queue", "prefill", "decode"],
        ["/v1/completions", "/v1/chat/completions"],
        [False, True],
        [socket.socket.close, reset],
    ),
)
def test_a_client_that_leaves_frees_its_blocks(paced, phase, path, stream, leave):
    server, text = paced, "abcdefgh" * 7  # 56 tokens: four steps of prefill
    content = {"prompt": text} if path == "/v1/completions" else {
        "messages": [{"role": "user", "content": text}]}  # fmt: skip
    others = []
    if phase == "queue":  # two others fill the batch
        others = [request(server, "/v1/completions", prompt="x", stream=True) for _ in range(2)]
        server.wait_for(lambda: server.engine.state().num_running == 2)
    num_open, begin = server.parts.gate.num_open, steps(server)
    wire = request(server, path, stream=stream, **content)
    server.wait_for(lambda: server.parts.gate.num_open == num_open + 1)
    if phase == "prefill":
        server.wait_for(lambda: server.engine.state().num_running == 1)
    if phase == "decode":
        server.wait_for(lambda: steps(server) > begin + 7)
    leave(wire)
    at = steps(server)
    server.wait_for(lambda: server.parts.gate.num_open == num_open)
    server.wait_for(lambda: server.engine.num_unfinished == num_open)
    assert steps(server) - at <= 12, "the request went on without its client"
    for each in others:
        each.close()
    server.assert_idle()


def test_a_client_that_leaves_while_it_sends(server: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    for sent in (head[:20], head, head + b"Content-Length: 99\r\n\r\n{"):
        wire = server.connect()
        wire.sendall(sent)
        time.sleep(0.05)
        reset(wire)
    server.assert_idle()
    server.complete("still there", max_tokens=2)


def test_a_pipelined_stream_of_a_client_that_reads_nothing(server: Served) -> None:
    """The second reply cannot begin, because the first one fills the connection's buffer."""
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.connect(("127.0.0.1", server.port))
    text = json.dumps({"prompt": "y" * 3_000_000, "return_token_strs": True}).encode()
    stream = json.dumps(LONG | {"prompt": "x", "stream": True, "max_tokens": 4}).encode()

    def send() -> None:
        for path, body in (("/tokenize", text), ("/v1/completions", stream)):
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            wire.sendall(head.encode() + body)

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(30)
    server.wait_for(lambda: server.parts.gate.num_open == 1)
    server.wait_for(lambda: server.engine.num_unfinished == 0)
    time.sleep(0.2)
    reset(wire)
    server.assert_idle()


# ---- bodies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False], ids=["content-length", "chunked"])
def test_a_body_above_the_limit_is_413(server: Served, known: bool) -> None:
    wire = server.connect()
    length = f"Content-Length: {MAX_BODY + 1}" if known else "Transfer-Encoding: chunked"
    wire.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
    if not known:
        piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        for _ in range(MAX_BODY // 65536 + 1):
            wire.sendall(piece)
        wire.sendall(b"0\r\n\r\n")
    got = everything(wire)
    wire.close()
    assert got.startswith(b"HTTP/1.1 413 "), got[:200]
    assert b"is larger than 8,388,608 bytes" in got
    server.complete("still there", max_tokens=2)


def test_a_body_of_the_limit_is_read(server: Served) -> None:
    body = b'{"prompt": "' + b"x" * (MAX_BODY - 14) + b'"}'
    assert len(body) == MAX_BODY
    reply = server.send("/v1/completions", body)
    assert reply.status == 400
    assert reply.data["error"]["code"] == "context_length_exceeded"
    assert reply.data["error"]["param"] == "prompt"


# ---- keys --------------------------------------------------------------------------------------


def test_every_route_but_two_needs_a_key(server: Served) -> None:
    keys = ("first", "schlüssel")
    with serving(server.engine, api_keys=keys) as server:
        routes = {r.path for r in server.app.routes} | {"/openapi.json", "/nothing", "//health",
                  "/health/", "/health/..", "/v1/models/x", "/%68ealth/../load"}  # fmt: skip
        for path in sorted(routes - {"/health", "/"}):
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"):
                reply = server.send(path, None, method)
                assert reply.status == 401, (method, path)
        assert server.send("/health").status == 200
        refused = server.send("/v1/models")
        assert set(refused.data["error"]) == {"message", "type", "param", "code"}
        for wrong in ("first", "Bearer", "Bearer ", "Bearer firs", "Bearer first x", "Basic first",
                      "Bearer " + "x" * 10_000, "Bearer First"):  # fmt: skip
            assert server.send("/v1/models", headers={"authorization": wrong}).status == 401
        for key in keys:
            for kind in ("Bearer", "bearer"):
                header = f"{kind} {key}".encode().decode("latin-1")
                assert server.send("/v1/models", headers={"authorization": header}).status == 200
        metrics = server.send("/metrics", headers={"authorization": header}).body
        for method in (b"GET", b"other"):  # such as PUT
            line = b'http_requests_total{handler="none",method="%s",status="401"} '
            assert line % method in metrics


# ---- health ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_health_depends_on_steps(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    go, step = threading.Event(), server.engine._engine.step
    go.set()
    monkeypatch.setattr(server.engine._engine, "step", lambda: go.wait(60) and step())
    with serving(server.engine, health_timeout=0.3) as server:
        server.complete("x", max_tokens=2)
        time.sleep(0.6)  # idle for longer than the limit
        assert server.send("/health").status == 200
        for _ in range(4):  # a request after a long idle time
            time.sleep(0.35)
            wire = request(server, "/v1/completions", prompt="x", max_tokens=2)
            assert server.send("/health").status == 200
            wire.close()
            server.assert_idle()
        go.clear()
        wire = request(server, "/v1/completions", prompt="x")
        server.wait_for(lambda: server.send("/health").status == 503, 10)
        assert "No step has completed" in server.send("/health").message
        go.set()
        server.wait_for(lambda: server.send("/health").status == 200, 10)
        wire.close()
        server.assert_idle()


# ---- the end -----------------------------------------------------------------------------------


def both(server: Served) -> tuple[socket.socket, socket.socket]:
    """A stream and a whole reply, which have begun."""
    wires = (request(server, "/v1/completions", prompt="x", stream=True),
             request(server, "/v1/completions", prompt="x"))  # fmt: skip
    server.wait_for(lambda: server.engine.num_unfinished == 2)
    return wires


def test_a_drain_finishes_what_runs(paced: Served) -> None:
    with serving(paced.engine, shutdown_timeout=30) as server:
        right = server.complete("x", **LONG)["choices"][0]["text"]
        wire, whole = both(server)
        server.http.handle_exit(15, None)
        reply = server.send("/v1/completions", {"prompt": "y"})
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert "is shutting down" in reply.message
        assert server.send("/health").status == 503
        got = everything(wire)
        assert b"[DONE]" in got
        assert b'"error"' not in got
        replied = json.loads(everything(whole).partition(b"\r\n\r\n")[2])
        assert replied["choices"][0]["text"] == right
        server.thread.join(30)
        assert not server.thread.is_alive()
        assert not server.http.failed


@pytest.mark.parametrize(("timeout", "signals"), [(0.3, 1), (300, 2)])
def test_a_drain_aborts_after_its_time_and_at_a_second_signal(
    server, monkeypatch, caplog, timeout, signals
):
    monkeypatch.setattr(server_module, "ERROR_SECONDS", 0.5)
    slow_steps(server, monkeypatch, 0.1)
    with serving(server.engine, shutdown_timeout=timeout) as server:
        wire, whole = both(server)
        server.http.handle_exit(15, None)
        if signals == 2:
            time.sleep(0.3)
            assert server.thread.is_alive()
            server.http.handle_exit(15, None)
        got, replied = everything(wire), everything(whole)
        assert b'data: {"error":{"message":"The server is shutting down' in got
        assert got.count(b"data: [DONE]") == 1
        assert replied.startswith(b"HTTP/1.1 503 ")
        assert b"is shutting down" in replied
        server.thread.join(30)
        assert not server.thread.is_alive()
        assert "The server aborts 2 sequences." in caplog.text


def test_a_dead_engine_ends_streams_and_the_server(folder, monkeypatch, caplog):
    monkeypatch.setattr(server_module, "ERROR_SECONDS", 0.5)
    with served(folder) as server:
        slow_steps(server, monkeypatch, 0.05)
        wire = request(server, "/v1/completions", prompt="x", stream=True)
        whole = request(server, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
        server.wait_for(lambda: server.engine.num_unfinished == 2)
        begin = steps(server)
        server.wait_for(lambda: steps(server) > begin + 3)
        assert wire.recv(1) == b"H"  # the stream has begun

        def fail() -> None:
            raise SystemExit("planted")

        server.engine._steps._inbox.put(fail)
        server.wait_for(lambda: not server.engine.is_running)
        assert server.send("/health").status == 503
        refused = server.send("/v1/completions", {"prompt": "y"})
        assert refused.status == 503
        assert "The engine has stopped." in refused.message
        assert b'data: {"error":{"message":"The engine has stopped.' in everything(wire)
        assert everything(whole).startswith(b"HTTP/1.1 503 ")
        server.thread.join(30)
        assert server.http.failed
        assert "The server stops: The engine's thread ended: SystemExit: planted" in caplog.text


@pytest.mark.parametrize("dies", [False, True])
def test_the_process_runs_with_quick_switches_and_says_how_it_ended(monkeypatch, dies):
    seen: list[float] = []
    server = SimpleNamespace(failed=dies, run=lambda sockets: seen.append(sys.getswitchinterval()))
    monkeypatch.setattr(server_module, "HttpServer", lambda *_: server)
    monkeypatch.setattr(server_module, "build_app", lambda *_: None)
    engine: Any = None
    with bound_socket("127.0.0.1", 0) as listening:
        assert server_module.serve(engine, Settings(("small",)), listening, print) == dies
    assert seen == [pytest.approx(server_module.SWITCH_SECONDS)]


def slow_steps(server: Served, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    """Make each step longer."""
    step = server.engine._engine.step

    def slow() -> object:
        time.sleep(seconds)
        return step()

    monkeypatch.setattr(server.engine._engine, "step", slow)


def everything(wire: socket.socket) -> bytes:
    """What a connection still gives, until its last chunk or its end."""
    got = b""
    while not got.endswith(b"0\r\n\r\n"):
        part = wire.recv(65536)
        got += part
        if not part or (b"}" in part and b"Content-Length" in got.title()):
            break
    return got
