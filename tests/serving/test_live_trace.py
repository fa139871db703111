"""`minillm trace URL`: the trace page of a running server."""

import errno
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from minillm import AsyncLLMEngine
from minillm.cli import main
from minillm.errors import TraceFileError
from minillm.lab.commands import trace as command
from minillm.lab.drawings import live
from minillm.lab.drawings.page import MARKER, write_page
from minillm.lab.drawings.timeline import timeline
from minillm.serving.app import build_app
from minillm.serving.settings import Settings
from tests.engine.small import write_model
from tests.serving.asgi_calls import call
from tests.serving.async_small import make_async, run
from tests.serving.http_small import serving

REFRESH = '<meta http-equiv="refresh" content="0.2">'


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLMEngine]:
    """An engine whose trace has the 12 steps of one request."""
    engine = make_async(write_model(tmp_path_factory.mktemp("byte-model")))
    body = {"prompt": "abc", "max_tokens": 12, "ignore_eos": True}
    assert run(call(build_app(engine, Settings(("m",))), "/v1/completions", body)).status == 200
    yield engine
    engine.shutdown()


def test_the_trace_of_a_server_is_fetched_with_its_key(engine):
    with serving(engine, request_trace=True, api_keys=("key",)) as server:
        url = server.url
        trace = live.fetch(url + "/", "key", last=5)
        assert [one.step for one in trace] == [8, 9, 10, 11, 12]
        with pytest.raises(TraceFileError, match="needs a key; add --api-key"):
            live.fetch(url)
    with pytest.raises(TraceFileError, match=r"cannot be reached: .*refused"):
        live.fetch(url)


def test_a_server_without_request_trace_says_how_to_start_it(engine, capsys):
    with serving(engine) as server:
        assert main(["trace", "table", server.url]) == 2
    assert "start it with --enable-request-trace" in capsys.readouterr().err


def test_table_and_view_take_a_server(engine, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(engine, request_trace=True) as server:
        assert main(["trace", "table", server.url, "--last", "3"]) == 0
        table = capsys.readouterr().out
        assert main(["trace", "view", server.url]) == 0
        assert main(["trace", "chrome", server.url]) == 0
    steps = [line.split()[0] for line in table.splitlines() if line.split()[0].isdigit()]
    assert steps == ["10", "11", "12"]
    page = Path("server.html").read_text()
    assert MARKER in page
    assert 'http-equiv="refresh"' not in page
    assert Path("server.chrome.json").exists()


def test_the_page_follows_the_server_and_keeps_its_last_state(engine, tmp_path, monkeypatch):
    path, seen = tmp_path / "page.html", []
    monkeypatch.chdir(tmp_path)
    with serving(engine, request_trace=True) as server:

        def stop(_: float) -> None:
            seen.append(path.read_text())
            if len(seen) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(live.time, "sleep", stop)
        arguments = ["trace", server.url, "-o", str(path), "--interval", "0.2"]
        assert main(arguments) == 130
        monkeypatch.undo()
    assert len(seen) == 3
    assert all(REFRESH in page for page in seen)
    last = path.read_text()
    assert 'http-equiv="refresh"' not in last
    assert MARKER in last[:2000]


def test_a_page_is_not_written_over_another_file(engine, tmp_path):
    path = tmp_path / "notes.html"
    path.write_text("my notes")
    with serving(engine, request_trace=True) as server:
        assert main(["trace", server.url, "-o", str(path)]) == 2
    assert path.read_text() == "my notes"


def test_a_page_that_cannot_be_written_leaves_the_previous_one(engine, tmp_path, monkeypatch):
    """A browser may load it at any time."""
    path, data = tmp_path / "page.html", timeline(engine.trace)
    write_page(data, path, reload=1)
    before, works = path.read_text(), Path.write_text

    def full(self: Path, text: str, encoding: str) -> int:
        works(self, text[: len(text) // 2], encoding)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(TraceFileError, match=r"page.html' cannot be written: No space left"):
        write_page(data, path, reload=1)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("arguments", "words"), [
    (["follow", "file.jsonl"], "follow needs the address of a server"),
    (["view", "file.jsonl", "--api-key", "x"], "--api-key is for the trace of a server"),
    (["http://localhost:1", "--interval", "0"], "--interval: '0' is not a number at least 0.1"),
    (["table", "http://localhost:1", "--interval", "2"], "--interval is for 'minillm trace"),
    (["view", "http://user:secret@localhost:1"], "localhost:1 cannot be reached"),
])  # fmt: skip
def test_wrong_options_are_one_sentence(arguments, words, cli):
    shown = cli("trace", *arguments)
    assert shown.refused(words)
    assert "secret" not in shown.err


def test_what_is_no_trace_is_refused(monkeypatch):
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        connection.recv(10_000)
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n<html>")
        connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(TraceFileError, match="is not a trace of minillm"):
        live.fetch(f"http://127.0.0.1:{listener.getsockname()[1]}")
    thread.join()
    listener.close()


def test_the_command_and_the_reader_agree_on_addresses():
    assert command.is_url("http://localhost")
    assert not command.is_url("run.jsonl")
    assert live.host("http://a:b@localhost:8000/x") == "localhost:8000"
