"""Failures at the start and while running: one clear sentence each, and the right exit code."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from minillm.text.tokenizer import Tokenizer
from tests.serving.http_small import served, write_chat_model

SECONDS = 90
SERVE = (sys.executable, "-m", "minillm", "serve")


def failed(arguments: Sequence[str], code: str = "") -> str:
    """The message of a server that does not start: one line, and exit code 2."""
    command = [*SERVE, *arguments]
    if code:
        command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    [line] = [each for each in done.stderr.splitlines() if "error:" in each]
    assert line.endswith((".", "'")), line
    return line


def test_a_port_in_use(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        line = failed([str(folder), "--port", str(port)])
    assert f"port {port}" in line
    assert "Address already in use" in line


@pytest.mark.slow
def test_a_model_that_is_missing(tmp_path: Path) -> None:
    assert "There is no folder" in failed([str(tmp_path / "nothing-here"), "--port", "0"])


def test_a_template_that_is_missing(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "none.jinja"
    line = failed([str(folder), "--port", "0", "--chat-template", str(file)])
    assert "none.jinja" in line
    assert "No such file" in line


def test_a_package_that_is_missing(folder: Path) -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from minillm.cli import main\n"
        "sys.exit(main(['serve', *sys.argv[1:]]))"
    )
    line = failed([str(folder), "--port", "0"], code)
    command = f"{sys.executable} -m pip install 'minillm-course[serve]'"
    assert f"needs the package fastapi; install it with {command}." in line


class Child:
    """`minillm serve` as a process."""

    def __init__(self, folder: Path, *options: str, code: str = "", **pipes: Any):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [*SERVE] if not code else [sys.executable, "-c", code]
        command += [str(folder), "--port", str(self.port), "--max-model-len", "64", *options]
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


@pytest.mark.slow
def test_a_step_thread_that_is_killed(folder: Path) -> None:
    """The server says why, refuses further requests, and ends with code 1."""
    code = (
        "import sys\n"
        "from minillm.engine.loop import Engine\n"
        "step = Engine.step\n"
        "def killed(engine):\n"
        "    if engine.scheduler.counters.num_steps > 6: raise SystemExit('planted')\n"
        "    return step(engine)\n"
        "Engine.step = killed\n"
        "from minillm.cli import main\n"
        "sys.exit(main(['serve', *sys.argv[1:]]))"
    )
    child = Child(folder, code=code)
    reply = child.get("/v1/completions", '{"prompt":"x","max_tokens":40,"ignore_eos":true}')
    assert reply.startswith("HTTP/1.1 503"), reply
    assert "The engine's thread ended: SystemExit: planted" in reply
    status, error = child.end()
    assert status == 1, error
    assert "The server stops: The engine's thread ended: SystemExit: planted" in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_second_signal_aborts_what_runs(folder: Path) -> None:
    """The request that the first signal lets finish gets a 503 at the second."""
    code = (
        "import sys, time\n"
        "from minillm.engine.loop import Engine\n"
        "step = Engine.step\n"
        "def slow(engine):\n"
        "    time.sleep(0.5 * bool(engine.scheduler.counters.num_steps > 6))\n"
        "    return step(engine)\n"
        "Engine.step = slow\n"
        "from minillm.cli import main\n"
        "sys.exit(main(['serve', *sys.argv[1:]]))"
    )
    child = Child(folder, code=code)
    body = '{"prompt":"x","max_tokens":60,"ignore_eos":true}'
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(child.get, "/v1/completions", body)
        while not re.search(r"^vllm:num_requests_running\S* 1", child.get("/metrics"), re.M):
            time.sleep(0.05)
        child.process.send_signal(signal.SIGTERM)
        while "503" not in child.get("/v1/completions", body)[:20]:
            time.sleep(0.05)
        status, error = child.end(signal.SIGTERM)
        assert waiting.result().startswith("HTTP/1.1 503"), waiting.result()
    assert status == 0, error
    assert "The server aborts 1 sequences." in error
    assert "Traceback" not in error


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tokenizer_that_raises(tmp_path, monkeypatch, caplog, stream, long):
    """A 500 without the error's text, which is in the log; the engine goes on."""
    with served(write_chat_model(tmp_path), max_model_len=128) as server:
        right = server.complete("x", max_tokens=4)["choices"][0]["text"]

        def fail(*args: Any, **more: Any) -> Any:
            raise RuntimeError("/secret/path is broken")

        with monkeypatch.context() as patch:
            patch.setattr(Tokenizer, "encode", fail)
            prompt = ["x" * 60] * 2 if long else "x"
            for path, body in (
                ("/v1/completions", {"prompt": prompt, "stream": stream}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}],
                                          "stream": stream}),
                ("/tokenize", {"prompt": "x"}),
            ):  # fmt: skip
                reply = server.send(path, body)
                assert reply.status == 500
                assert reply.message == (
                    "The server failed (RuntimeError); its log has the details."
                )
        assert "/secret/path is broken" in caplog.text
        assert server.complete("x", max_tokens=4)["choices"][0]["text"] == right
