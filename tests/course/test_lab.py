"""notebooks/lab.py: copies without answers, nothing of the learner's lost, a place to go on."""

import os
import re
from pathlib import Path

import pytest
from notebook_chapter import chapters, lab
from toy_notebooks import code, fact, markdown, write

read_notebook, write_notebook = chapters.read_notebook, chapters.write_notebook


@pytest.fixture
def course(tmp_path) -> Path:
    """A course of two chapters with an index and a figure."""
    folder = tmp_path / "course"
    (folder / "figures").mkdir(parents=True)
    (folder / "README.md").write_text("# The course\n")
    (folder / "GLOSSARY.md").write_text("# Words\n")
    (folder / "figures" / "00.png").write_bytes(b"png")
    write(folder, "00_first", markdown("# One"), fact("count", 3))
    write(folder, "01_second", markdown("# Two"), fact("count", 4))
    return folder


@pytest.fixture
def desk(tmp_path) -> Path:
    """Where the copies go."""
    return tmp_path / "work" / "notebooks"


def edit(path: Path, source: str, **values) -> None:
    """Change a notebook's last cell as a person would."""
    notebook = read_notebook(path)
    notebook["cells"][-1] |= {"source": source, **values}
    write_notebook(path, notebook)


def upstream(course: Path, source: str = "print('count: 5')") -> None:
    """A new version of the first chapter arrives."""
    edit(course / "00_first.ipynb", source)


def source_of(path: Path) -> str:
    return read_notebook(path)["cells"][-1]["source"]


def test_copies_have_no_outputs_and_the_originals_stay(course, desk):
    before = (course / "00_first.ipynb").read_bytes()
    _, said = lab.prepare(course, desk)
    (cell,) = [c for c in read_notebook(desk / "00_first.ipynb")["cells"] if "outputs" in c]
    assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert (course / "00_first.ipynb").read_bytes() == before
    assert (desk / "README.md").read_text() == "# The course\n"
    assert (desk / "figures" / "00.png").exists()
    assert (desk / "GLOSSARY.md").exists()
    assert len(said) == 1
    assert str(desk) in said[0]


def test_an_untouched_copy_follows_upstream(course, desk):
    lab.prepare(course, desk)
    upstream(course)
    assert lab.prepare(course, desk)[1] == ["00_first: updated"]
    assert source_of(desk / "00_first.ipynb") == "print('count: 5')"


@pytest.mark.parametrize(
    "values",
    [{"source": "my own idea"}, {"outputs": code("", says="3\n")["outputs"]}],
    ids=["edited", "run"],
)
def test_a_touched_copy_is_never_overwritten(course, desk, values):
    lab.prepare(course, desk)
    edit(desk / "00_first.ipynb", **{"source": source_of(desk / "00_first.ipynb"), **values})
    mine = (desk / "00_first.ipynb").read_bytes()
    upstream(course)
    (said,) = lab.prepare(course, desk)[1]
    assert "00_first.new.ipynb" in said
    assert (desk / "00_first.ipynb").read_bytes() == mine
    assert source_of(desk / "00_first.new.ipynb") == "print('count: 5')"


def test_the_newer_version_is_offered_once_and_then_kept_up_to_date(course, desk):
    lab.prepare(course, desk)
    edit(desk / "00_first.ipynb", "mine")
    upstream(course)
    lab.prepare(course, desk)
    assert lab.prepare(course, desk)[1] == []
    (desk / "00_first.new.ipynb").unlink()  # they have looked at it
    assert lab.prepare(course, desk)[1] == []
    assert not (desk / "00_first.new.ipynb").exists()
    upstream(course, "print('count: 6')")
    assert len(lab.prepare(course, desk)[1]) == 1
    assert source_of(desk / "00_first.new.ipynb") == "print('count: 6')"


def test_an_edited_newer_version_is_theirs_too(course, desk):
    lab.prepare(course, desk)
    edit(desk / "00_first.ipynb", "mine")
    upstream(course)
    lab.prepare(course, desk)
    edit(desk / "00_first.new.ipynb", "mine too")
    upstream(course, "print('count: 6')")
    lab.prepare(course, desk)
    assert source_of(desk / "00_first.new.ipynb") == "mine too"


def test_opening_and_saving_is_no_edit(course, desk):
    """Jupyter writes the Python version into the metadata of what it saves."""
    lab.prepare(course, desk)
    notebook = read_notebook(desk / "00_first.ipynb")
    notebook["metadata"]["language_info"]["version"] = "3.12.1"
    write_notebook(desk / "00_first.ipynb", notebook)
    upstream(course)
    assert lab.prepare(course, desk)[1] == ["00_first: updated"]


@pytest.mark.parametrize("damage", ["{", "[]"])
def test_without_the_record_every_copy_is_taken_for_edited(course, desk, damage):
    lab.prepare(course, desk)
    (desk / ".copied.json").write_text(damage)
    upstream(course)
    lab.prepare(course, desk)
    assert source_of(desk / "00_first.ipynb") == "print('count: 3')"


def test_a_copy_that_is_no_notebook_is_left_alone(course, desk):
    lab.prepare(course, desk)
    (desk / "00_first.ipynb").write_text("half a note")
    upstream(course)
    lab.prepare(course, desk)
    assert (desk / "00_first.ipynb").read_text() == "half a note"


def start(course, desk, chapter=None, index=False):
    return lab.where_to_start(lab.Desk.at(desk), course, chapter, index)


def test_it_starts_at_the_index_and_resumes_where_one_was(course, desk):
    lab.prepare(course, desk)
    assert start(course, desk)[0] == "README.md"
    for age, stem in enumerate(["00_first", "01_second"]):
        edit(desk / f"{stem}.ipynb", "mine")
        os.utime(desk / f"{stem}.ipynb", (1000 - age, 1000 - age))
    name, why = start(course, desk)
    assert name == "00_first.ipynb"
    assert why.startswith("You were last in 00_first")
    assert start(course, desk, index=True)[0] == "README.md"
    assert start(course, desk, chapter="01")[0] == "01_second.ipynb"


def test_the_command_opens_the_page_and_its_settings_are_in_place(course, desk):
    lab.prepare(course, desk)
    words = lab.command(desk, "README.md", browser=False, port=8899)
    assert words[1:3] == ["-m", "jupyterlab"]
    assert {"--LabApp.default_url=/lab/tree/README.md", "--no-browser", "--port=8899"} <= {*words}
    assert f"--ServerApp.root_dir={desk}" in words
    settings = desk / ".jupyter" / "labconfig" / "default_setting_overrides.json"
    assert "Markdown Preview" in settings.read_text()


def test_without_jupyterlab_it_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MINILLM_WORK", str(tmp_path))
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: None)
    assert lab.script_errors(lambda: lab.main([])) == 1
    assert "JupyterLab is not installed" in capsys.readouterr().err


PAGE = (
    "Read [`Pool`](../minillm/cache/blocks.py#L23-L40) and "
    "[`blocks.py`](../minillm/cache/blocks.py), then [02](02_next.ipynb) and the "
    "[path](../minillm/README.md#the-path)."
)


def test_links_to_the_engine_open_in_the_checkout(tmp_path: Path) -> None:
    """JupyterLab counts lines from 0. Outside of the checkout it cannot open them."""
    assert lab.relinked(PAGE, lab.ROOT / "work" / "notebooks") == (
        "Read [`Pool`](../../minillm/cache/blocks.py#line=22) and "
        "[`blocks.py`](../../minillm/cache/blocks.py), then [02](02_next.ipynb) and the "
        "[path](../../minillm/README.md#the-path)."
    )
    assert lab.relinked(PAGE, tmp_path) == (
        "Read `Pool` (`minillm/cache/blocks.py`) and `minillm/cache/blocks.py`, "
        "then [02](02_next.ipynb) and the path (`minillm/README.md`)."
    )


def test_in_the_checkout_jupyterlab_opens_at_its_root() -> None:
    folder = Path("desk", "notebooks")
    words = lab.command(lab.ROOT / folder, "03_kv.ipynb", browser=True, port=None)
    assert f"--ServerApp.root_dir={lab.ROOT}" in words
    assert f"--LabApp.default_url=/lab/tree/{folder.as_posix()}/03_kv.ipynb" in words
    assert any("checkpoint_dir=" in word and ".checkpoints" in word for word in words)


def test_links_of_copies_lead_to_files(desk: Path) -> None:
    folder = lab.ROOT / "work" / "notebooks"
    found = 0
    for path in [*lab.NOTEBOOKS.glob("*.ipynb"), *lab.NOTEBOOKS.glob("*.md")]:
        text = lab.relinked(path.read_text("utf-8"), folder)
        for target in re.findall(r"\]\((\.\./[^)#]+)", text):
            if re.match(rf"\.\./\.\./{lab.CODE}/", target):
                assert (folder / target).resolve().exists(), (path.name, target)
                found += 1
    assert found > 80
    lab.prepare(lab.NOTEBOOKS, desk)
    for path in [*desk.glob("*.ipynb"), *desk.glob("*.md")]:
        assert "](../" not in path.read_text("utf-8"), path.name
