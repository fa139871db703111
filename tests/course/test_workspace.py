"""The learner's folder and its memory: nothing is overwritten, nothing is lost."""

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from minillm_exercises import progress as progress_module
from minillm_exercises import workspace
from minillm_exercises.errors import ExerciseError
from minillm_exercises.progress import Entry, ProgressFile
from minillm_exercises.session import suggestion
from minillm_exercises.workspace import work_root
from tests.course.small import SOLUTION, Terminal


def test_where_the_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_WORK", str(tmp_path / "mine"))
    assert work_root() == tmp_path / "mine"
    monkeypatch.setenv("MINILLM_WORK", "~/mine")
    assert work_root() == Path.home() / "mine"
    monkeypatch.delenv("MINILLM_WORK")
    assert work_root() == Path(__file__).parents[2] / "work"
    monkeypatch.setattr(workspace, "exercises_root", lambda: tmp_path)  # an installed package
    monkeypatch.chdir(tmp_path)
    assert work_root() == tmp_path / "work"


def test_putting_the_same_text_keeps_no_copy(at: Terminal) -> None:
    path = at.file()
    at.session.workspace.put(path, "a")
    at.session.workspace.put(path, "a")
    history = at.session.workspace.root / ".history"
    assert not history.exists()
    at.session.workspace.put(path, "b")
    assert [file.read_text() for file in history.iterdir()] == ["a"]


def test_a_folder_that_cannot_be_written_is_said(at: Terminal) -> None:
    at.session.workspace.root.write_text("a file where the folder should be")
    with pytest.raises(ExerciseError, match=r"cannot be written .*set MINILLM_WORK"):
        at.session.start(at.exercise())


def test_entries_are_kept(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path / "deep" / "progress.json")
    assert file.read().entries == {}
    file.set("e90.1", hints=2)
    file.update("e90.2", lambda entry: replace(entry, attempts=entry.attempts + 1))
    file.set("e90.1", passed=True)
    found = file.read()
    assert found.of("e90.1") == Entry(hints=2, passed=True)
    assert found.of("e90.2").attempts == 1
    assert found.last == "e90.1"
    assert found.of("e90.3") == Entry()
    assert sorted(p.name for p in file.path.parent.iterdir()) == ["progress.json"]


DAMAGED = [
    "", "{", "[]", "null", '{"exercises": []}', '{"exercises": {"e90.1": 3}}', '"\\ud800"', "\x00",
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED)
def test_damage_is_set_aside(tmp_path: Path, text: str) -> None:
    file = ProgressFile(tmp_path / "progress.json")
    for number in (1, 2):
        file.path.write_text(text)
        kept = tmp_path / ".history" / f"progress.{number}.json"
        assert f"is now {workspace.shown_path(kept)};" in file.read().notice
        assert kept.read_text() == text
    file.set("e90.1", hints=1)
    assert file.read().notice == ""


def test_what_a_later_version_wrote_is_kept(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path / "progress.json")
    entry = {"hints": 1, "stars": 5, "attempts": "many", "passed": 1}
    file.path.write_text(json.dumps({"version": 2, "mood": "good", "exercises": {"e90.1": entry}}))
    assert file.read().of("e90.1") == Entry(hints=1)  # wrong types count as absent
    file.set("e90.1", hints=2)
    data = json.loads(file.path.read_text())
    assert (data["version"], data["mood"]) == (2, "good")
    assert (data["exercises"]["e90.1"]["stars"], data["exercises"]["e90.1"]["hints"]) == (5, 2)


def _count(path: Path, exercise_id: str, times: int) -> None:
    for _ in range(times):
        ProgressFile(path).update(exercise_id, lambda e: replace(e, attempts=e.attempts + 1))


@pytest.mark.slow
def test_processes_do_not_lose_each_others_entries(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    context = multiprocessing.get_context("spawn")
    ids = ["e90.1", "e90.1", "e90.2"]
    workers = [context.Process(target=_count, args=(path, name, 40)) for name in ids]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found = ProgressFile(path).read()
    assert found.of("e90.1").attempts == 80
    assert found.of("e90.2").attempts == 40


def test_a_lock_that_was_left_behind_is_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_module, "PATIENCE", 0.05)
    (tmp_path / "progress.lock").touch()
    ProgressFile(tmp_path / "progress.json").set("e90.1", hints=1)
    assert ProgressFile(tmp_path / "progress.json").read().of("e90.1").hints == 1
    assert not (tmp_path / "progress.lock").exists()


def test_an_untouched_starter_is_no_attempt(at: Terminal) -> None:
    at.type("start", "e90.1")
    at.type("run")
    assert at.session.progress().of("e90.1").attempts == 0
    at.write(SOLUTION)
    at.type("run")
    at.type("run")
    entry = at.session.progress().of("e90.1")
    assert (entry.attempts, entry.status, entry.earned, entry.points) == (2, "pass", 3, 3)


def test_what_comes_next(at: Terminal) -> None:
    def following(last: str) -> str:
        row = suggestion(at.session.standings(), last)
        return row.exercise.id if row else "nothing"

    assert following("") == "e90.1"
    assert following("e90.2") == "e90.2"  # in order from the last one
    at.write("", "e90.1")
    assert following("e90.2") == "e90.1"  # begun comes before open
    at.write("", "e90.2")
    assert following("") == "e90.1"
    at.file("e90.2").unlink()
    at.write(SOLUTION)
    at.type("run", "e90.1")
    assert following("e90.1") == "e90.2"
    at.write("", "e90.2")
    at.session.progress_file.set("e90.2", status="pass")
    assert following("e90.2") == "nothing"  # e91.1 cannot be done here


def test_files_of_the_learner_survive_any_command(at: Terminal) -> None:
    at.write(SOLUTION)
    before = at.file().read_bytes()
    for words in (
        ["start", "e90.1"], ["start", "e90.1", "--new"], ["run", "--all"], ["hint", "e90.1"],
        ["solution", "e90.1", "--save"], ["list"], ["report"],
    ):  # fmt: skip
        at.type(*words)
    assert at.file().read_bytes() == before
    assert os.path.samefile(at.file(), at.session.workspace.file(at.exercise()))
