"""The small engine of a learner's exercises: every combination of parts, and mistakes."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

from minillm_exercises.assemble import PARTS, assemble
from minillm_exercises.errors import ExerciseError
from minillm_exercises.manifest import load_manifest
from minillm_exercises.session import Session
from minillm_exercises.workspace import Workspace

MANIFEST = load_manifest()
TEMPLATE = MANIFEST["e03.1"].folder.parent / "engine" / "engine.py"


def session_with(root: Path, passed: dict[str, str]) -> Session:
    """A learner who has passed these exercises with these sources."""
    session = Session(MANIFEST, Workspace(root))
    for name, source in passed.items():
        file = session.workspace.file(MANIFEST[name])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
        session.progress_file.update(name, lambda entry: entry.__class__(passed=True))
    return session


def solution(name: str) -> str:
    return (MANIFEST[name].answers / "solution.py").read_text(encoding="utf-8")


def run(folder: Path, monkeypatch, capsys, prompts: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run an assembled engine in this process."""
    monkeypatch.syspath_prepend(str(folder))
    for name in PARTS:
        monkeypatch.delitem(sys.modules, name.replace(".", "_"), raising=False)
    spec = importlib.util.spec_from_file_location("assembled_engine", folder / "engine.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    status = module.main([*prompts])
    for name in PARTS:
        sys.modules.pop(name.replace(".", "_"), None)
    return status, capsys.readouterr().out


MINE = "request 0 (equal to LLM.generate):\ndef add(a, b):"


@pytest.mark.parametrize(("parts", "prompts", "says"), [
    (("e03.1",), ("def add(a, b):",), ["rows of e03.1", "one request at a time", MINE]),
    (("e03.1", "e06.1"), (), ["rows of e03.1", "scheduler of e06.1", "computed every time"]),
    (("e07.1",), (), ["blocks of e07.1", "one request at a time", "second answer (equal"]),
    (PARTS, (), ["blocks of e07.1", "scheduler of e06.1", "tree of e09.1"]),
])  # fmt: skip
def test_texts_are_those_of_the_real_engine(parts, prompts, says, tmp_path, monkeypatch, capsys):
    session = session_with(tmp_path, {name: solution(name) for name in parts})
    file, lines = assemble(session)
    assert lines[0].endswith(f"has {', '.join(parts)}.")
    assert len(lines) == 1 + len(PARTS) - len(parts)
    status, text = run(file.parent, monkeypatch, capsys, prompts)
    assert status == 0, text
    assert ("request 1" in text) == (not prompts)
    assert all(part in text for part in says), text
    assert "tokens are equal" not in text


def test_a_shared_start_is_computed_once(tmp_path, monkeypatch, capsys):
    session = session_with(tmp_path, {name: solution(name) for name in PARTS})
    _, text = run(assemble(session)[0].parent, monkeypatch, capsys)
    last = text.strip().splitlines()[-1]
    steps, computed, whole = (int(word) for word in last.replace(".", "").split() if word.isdigit())
    assert computed < whole - 30, last
    assert steps < 72


def test_a_prompt_that_does_not_fit_is_one_sentence(tmp_path, monkeypatch, capsys):
    session = session_with(tmp_path, {"e03.1": solution("e03.1")})
    with pytest.raises(SystemExit, match=r"has [\d,]+ tokens; it must have 1 to 488\."):
        run(assemble(session)[0].parent, monkeypatch, capsys, ("def f():", "x = 1\n" * 400))


MISTAKES = {
    "e03.1": ("range(length - count, length)", "range(count)"),
    "e07.1": ("source = table[-1]\n", "source = None\n"),
    "e09.1": ("found += edge.slots[:shared]", "found += edge.slots[:1] * shared"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_part_is_seen(name, tmp_path, monkeypatch, capsys):
    old, new = MISTAKES[name]
    parts = ("e03.1",) if name == "e03.1" else PARTS
    sources = {each: solution(each) for each in parts}
    assert old in sources[name]
    sources[name] = sources[name].replace(old, new)
    session = session_with(tmp_path, sources)
    try:
        status, _ = run(assemble(session)[0].parent, monkeypatch, capsys)
    except (TypeError, IndexError):
        status = 1
    assert status == 1


def test_what_is_not_passed_is_not_used(tmp_path):
    with pytest.raises(ExerciseError, match=r"needs e03\.1 .* or e07\.1"):
        assemble(session_with(tmp_path, {"e06.1": solution("e06.1")}))
    session = session_with(tmp_path, {"e03.1": solution("e03.1")})
    shutil.copy(session.workspace.file(MANIFEST["e03.1"]), tmp_path / "own.py")
    file, lines = assemble(session)
    assert lines[1:] == ["e07.1 is not passed yet.", "e09.1 is not passed yet."]
    assert sorted(path.name for path in file.parent.iterdir()) == ["e03_1.py", "e06_1.py",
                                                                   "engine.py"]  # fmt: skip


def test_an_engine_that_was_changed_stays(tmp_path):
    session = session_with(tmp_path, {"e03.1": solution("e03.1")})
    file, _ = assemble(session)
    assert file.read_text(encoding="utf-8") == TEMPLATE.read_text(encoding="utf-8")
    file.write_text("# mine\n", encoding="utf-8")
    assemble(session)
    assert file.read_text(encoding="utf-8") == "# mine\n"


def test_the_command_and_the_notebook_run_it(tmp_path, monkeypatch, capfd):
    from minillm_exercises import engine
    from minillm_exercises.cli import main

    monkeypatch.setenv("MINILLM_WORK", str(tmp_path))
    assert main(["engine"]) != 0
    assert "needs e03.1" in "".join(capfd.readouterr())
    engine()
    assert "needs e03.1" in capfd.readouterr().out
    session_with(tmp_path, {"e03.1": solution("e03.1")})
    own = tmp_path / "engine" / "engine.py"
    own.parent.mkdir()
    own.write_text("import sys\nprint(sys.argv[1:])\nsys.exit(len(sys.argv) > 2)\n")
    assert main(["engine", "def add(a, b):"]) == 0
    assert "['def add(a, b):']" in capfd.readouterr().out
    assert main(["engine", "two", "words"]) == 1
    capfd.readouterr()
    engine("x")
    assert "['x']" in capfd.readouterr().out
    assert json.loads((tmp_path / "progress.json").read_text())["exercises"]["e03.1"]["passed"]
