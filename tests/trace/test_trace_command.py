"""`minillm trace` and `minillm generate --trace`: what they write, say and refuse."""

import json
import re
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import LLM
from minillm.cli import generate
from minillm.cli.replaceable import TRACE_START
from minillm.lab.commands.trace import CHROME_START
from minillm.lab.drawings.timeline import timeline
from minillm.trace.recorder import Trace
from tests.trace.simulation import simulate


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A trace in a file."""
    path = tmp_path / "run.jsonl"
    simulate(8, 24).save(path)
    return path


def embedded(path: Path) -> Any:
    """The data in a page."""
    found = re.search(
        r'<script id="data" type="application/json">(.*?)</script>', path.read_text("utf-8")
    )
    assert found
    return json.loads(found[1])


def test_view_writes_a_page_beside_the_trace_and_says_where(saved: Path, cli: Any) -> None:
    shown = cli("trace", "view", saved)
    page = saved.with_suffix(".html")
    assert (shown.code, shown.out) == (0, f"{page}\n")
    assert "steps; open it in a browser" in shown.err
    assert embedded(page) == json.loads(json.dumps(timeline(Trace.load(saved))))
    assert "<title>run.jsonl</title>" in page.read_text("utf-8")
    assert cli("trace", "view", saved).code == 0  # its own page may be replaced


def test_view_writes_where_it_is_told(saved: Path, cli: Any, tmp_path: Path) -> None:
    shown = cli("trace", "view", saved, "-o", tmp_path / "other.htm")
    assert shown.out == f"{tmp_path / 'other.htm'}\n"
    assert embedded(tmp_path / "other.htm")
    assert not saved.with_suffix(".html").exists()


@pytest.mark.parametrize("works", [True, False])
def test_open_shows_the_page(works, saved, cli, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(opened.append(address)) or works)
    shown = cli("trace", "view", saved, "--open")
    assert opened == [saved.with_suffix(".html").resolve().as_uri()]
    assert ("No browser could be started" in shown.err) == (not works)
    assert shown.code == 0


def test_table_prints_the_last_steps(saved: Path, cli: Any) -> None:
    trace = Trace.load(saved)
    assert cli("trace", "table", saved).out == trace.table(40) + "\n"
    assert cli("trace", "table", saved, "--last", 3).out == trace.table(3) + "\n"
    assert cli("trace", "table", saved, "--last", 3).out.count("\n") == 4


def test_chrome_writes_events(saved: Path, cli: Any, tmp_path: Path) -> None:
    shown = cli("trace", "chrome", saved)
    events = saved.with_suffix(".chrome.json")
    assert (shown.code, shown.out) == (0, f"{events}\n")
    assert events.read_bytes().startswith(CHROME_START)
    assert json.loads(events.read_text())["traceEvents"]
    assert cli("trace", "chrome", saved).code == 0  # its own file may be replaced
    assert cli("trace", "chrome", saved, "-o", tmp_path / "e.json").out == f"{tmp_path}/e.json\n"


@pytest.mark.parametrize(("argv", "message"), [
    (["show", "{saved}"], "There is no action 'show'; choose view, table or chrome."),
    (["tabel", "{saved}"], "Did you mean 'table'?"),
    (["view", "{tmp}/nowhere.jsonl"], "nowhere.jsonl cannot be read: No such file"),
    (["table", "{tmp}"], "cannot be read: Is a directory"),
    (["chrome", "{tmp}/notes.txt"], "is not a trace of minillm"),
    (["view", "{tmp}/cut.jsonl"], "is not a step of a trace"),
    (["view", "{tmp}/empty.jsonl"], "is empty"),
    (["view", "{saved}", "-o", "{tmp}/notes.txt"], "exists and is not a trace page"),
    (["view", "{saved}", "-o", "{saved}"], "exists and is not a trace page"),
    (["view", "{saved}", "-o", "{tmp}/no/x.html"], "cannot be written: No such file"),
    (["chrome", "{saved}", "-o", "{tmp}/notes.txt"], "exists and is no file that 'minillm"),
    (["chrome", "{saved}", "-o", "{saved}"], "exists and is no file that 'minillm trace"),
    (["chrome", "{saved}", "-o", "{tmp}/no/x"], "cannot be written: there is no such folder"),
    (["chrome", "{saved}", "-o", "{tmp}"], "is a folder; give the name of a file"),
    (["table", "{saved}", "--last", "0"], "--last: '0' is not an integer at least 1"),
    (["table", "{saved}", "--open"], "--open is for 'minillm trace view'"),
    (["table", "{saved}", "-o", "x"], "--output is for 'minillm trace view or chrome'"),
    (["view", "{saved}", "--last", "3"], "--last is for 'minillm trace table'"),
    (["{saved}"], "The file comes after the action: 'minillm trace view"),
    (["table"], "There is no FILE; add one: 'minillm trace table FILE'."),
], ids=str)  # fmt: skip
def test_a_mistake_is_one_sentence(argv, message, saved, tmp_path, cli):
    files = {"notes.txt": "milk, eggs", "cut.jsonl": saved.read_text()[:-40], "empty.jsonl": ""}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    before = saved.read_bytes()
    shown = cli("trace", *(arg.format(saved=saved, tmp=tmp_path) for arg in argv))
    assert shown.refused(message), shown.err
    assert saved.read_bytes() == before
    assert (tmp_path / "notes.txt").read_text() == "milk, eggs"


def test_generate_saves_what_the_engine_did(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    shown = cli("generate", "def f(", "--max-tokens", 5, "--trace", path)
    assert shown.code == 0
    assert f"trace of 5 steps in {path}" in shown.err
    assert path.read_bytes().startswith(TRACE_START)
    trace = Trace.load(path)
    assert trace.settings.model == "tiny"
    assert sum(len(record.rows) for record in trace) == 5
    assert cli("generate", "x", "--max-tokens", 2, "--json", "--trace", path).code == 0
    assert len(Trace.load(path)) == 2  # a trace may be replaced


def test_an_interrupted_run_saves_its_trace(cli, tmp_path, monkeypatch):
    def interrupted(self: LLM, *args: Any) -> Iterator[Any]:
        for number, output in enumerate(real(self, *args)):
            if number == 3:
                raise KeyboardInterrupt
            yield output

    real = LLM.stream
    monkeypatch.setattr(LLM, "stream", interrupted)
    path = tmp_path / "run.jsonl"
    shown = cli("generate", "def f(", "--max-tokens", 50, "--trace", path)
    assert shown.code == 130
    assert len(Trace.load(path)) >= 3


@pytest.mark.parametrize(("name", "message"), [
    ("notes.txt", "exists and is no trace; give another name, or delete it."),
    ("no/run.jsonl", "cannot be written: there is no such folder."),
    (".", "is a folder; give the name of a file."),
])  # fmt: skip
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_loaded(
    name: str, message: str, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "read_prompt", lambda *_: pytest.fail("too late"))
    (tmp_path / "notes.txt").write_text("milk, eggs")
    shown = cli("generate", "x", "--trace", tmp_path / name)
    assert shown.refused(message), shown.err
    assert (tmp_path / "notes.txt").read_text() == "milk, eggs"


def test_a_trace_that_cannot_be_saved_in_the_end_is_one_sentence(cli, tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trace, "save", full)
    shown = cli("generate", "x", "--max-tokens", 1, "--trace", tmp_path / "run.jsonl")
    assert shown.code == 2
    assert "cannot be written: No space left on device.\n" in shown.err
