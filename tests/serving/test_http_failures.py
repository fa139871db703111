"""Failures at the start and while running: one clear sentence each, and the right exit code."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from minillm.text.tokenizer import Tokenizer
from tests.serving.http_small import served

SECONDS = 90
SERVE = (sys.executable, "-m", "minillm", "serve")


def test_what_cannot_start_is_one_sentence(folder, tmp_path, cli, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert cli("serve", folder, "--port", port).refused(f"port {port}: Address already in use")
    missing = tmp_path / "none"
    shown = cli("serve", folder, "--port", 0, "--chat-template", missing)
    assert shown.refused(f"{str(missing)!r} cannot be read: No such file")
    shown = cli("serve", missing, "--port", 0)
    assert shown.code == 2
    assert "There is no folder" in shown.err.splitlines()[-1]
    monkeypatch.delitem(sys.modules, "minillm.serving.launch")
    monkeypatch.delattr("minillm.serving.launch")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    command = f"{sys.executable} -m pip install 'minillm-course[serve]'"
    needs = f"needs the package uvicorn; install it with {command}."
    assert cli("serve", folder, "--port", 0).refused(needs)


class Child:
    """`minillm serve` as a process."""

    def __init__(self, folder: Path, *options: str, **pipes: Any):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [*SERVE, str(folder), "--port", str(self.port), "--max-model-len", "64", *options]
        self.process = subprocess.Popen(
            command, text=True, **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes)
        )
        end = time.monotonic() + SECONDS
        while not self.get("/health").startswith("HTTP/1.1 200"):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)

    def get(self, path: str, body: str = "", header: str = "") -> str:
        """A whole reply, or nothing."""
        method = "POST" if body else "GET"
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS) as wire:
                wire.sendall(
                    f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}"
                    f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
                )
                got = b""
                while part := wire.recv(65536):
                    got += part
                return got.decode()
        except OSError:
            return ""

    def end(self, *signals: int) -> tuple[int, str]:
        """The exit code and the standard error after signals."""
        for each in signals:
            self.process.send_signal(each)
        _, error = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, error or ""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_with_code_0(folder: Path, number: int) -> None:
    child = Child(folder, "--api-key", "right")
    assert child.get("/v1/models").startswith("HTTP/1.1 401")
    wrong = child.get("/v1/models", header="Authorization: Bearer wrong\r\n")
    assert wrong.startswith("HTTP/1.1 401")
    assert "The API key is missing or wrong" in wrong
    right = child.get("/v1/models", header="Authorization: Bearer right\r\n")
    assert right.startswith("HTTP/1.1 200")
    code, error = child.end(number)
    assert code == 0, error
    assert "Traceback" not in error


@pytest.mark.slow
def test_logs_on_a_full_disk(folder: Path) -> None:
    """Lines of the log are lost, requests are not."""
    with Path("/dev/full").open("w") as full:
        child = Child(folder, stdout=full, stderr=full)
        for _ in range(3):
            reply = child.get("/v1/completions", '{"prompt":"x","max_tokens":3}')
            assert reply.startswith("HTTP/1.1 200")
            assert child.get("/v1/completions", '{"prompt":""}').startswith("HTTP/1.1 400")
        code, _ = child.end(signal.SIGTERM)
    assert code in (0, 1, 120), "Python itself ends with 120 if it cannot flush"


def test_a_tokenizer_that_raises(folder, monkeypatch, caplog):
    """A 500 without the error's text, which is in the log; the engine goes on."""

    def fail(*args: Any, **more: Any) -> Any:
        raise RuntimeError("/secret/path is broken")

    with served(folder, max_model_len=128) as server:
        right = server.complete("x", max_tokens=4)["choices"][0]["text"]
        chat = {"messages": [{"role": "user", "content": "x"}]}
        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "encode", fail)
            for path, body in (
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/completions", {"prompt": ["x" * 60] * 2}),
                ("/v1/chat/completions", chat),
                ("/tokenize", {"prompt": "x"}),
            ):
                for stream in (False, True):
                    reply = server.send(path, body | {"stream": stream})
                    text = "The server failed (RuntimeError); its log has the details."
                    assert (reply.status, reply.message) == (500, text)
        assert "/secret/path is broken" in caplog.text
        assert server.complete("x", max_tokens=4)["choices"][0]["text"] == right
