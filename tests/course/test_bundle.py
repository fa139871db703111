"""notebooks/bundle.py: pages that need nothing else, a wheel, and how to install them offline."""

import re
import zipfile

import pytest
from notebook_chapter import NOTEBOOKS, bundle, chapters
from toy_notebooks import code, fact, markdown, notebook

CAPTION = "Time against <length>: the line rises."
PLOT = {
    "output_type": "display_data",
    "data": {"image/png": "iVBORw0KGgo=", "text/plain": "[figure]"},
    "metadata": {"image/png": {"alt": CAPTION}},
}
TABLE = {
    "output_type": "display_data",
    "data": {"text/html": "<table><tr><td>7 ms</td></tr></table><script>fetch('x')</script>"},
    "metadata": {},
}
CELLS = (
    markdown('# It slows & falls\n\nSaves <span data-fact="count">3</span> & more.'),
    fact("count", 3),
    code("show(fig, caption)", outputs=(PLOT, TABLE)),
)


@pytest.fixture(scope="module")
def page() -> str:
    """A small chapter as a page."""
    return bundle.printable(NOTEBOOKS / "90_toy.ipynb", notebook(*CELLS))


def test_a_page_holds_code_outputs_and_pictures_with_their_texts(page):
    assert "count: 3\n" in page
    assert 'src="data:image/png;base64,iVBORw0KGgo="' in page
    assert 'alt="Time against &lt;length&gt;: the line rises."' in page
    assert "<td>7 ms</td>" in page
    assert "@media print" in page
    assert "<title>It slows &amp; falls</title>" in page


def test_a_page_shows_the_kinds_of_cells_and_folds_the_code_of_facts(page):
    assert re.search(r'class="[^"]*code_cell[^"]*celltag_facts', page)  # what the style sheet names
    assert '.celltag_facts::before { content: "Fact"; }' in page
    assert re.search(r"<details><summary>Code</summary>.{0,300}count", page, re.DOTALL)


def test_a_page_loads_nothing_from_anywhere(page):
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)
    assert not re.findall(r"url\(|@import", page)


def test_a_chapter_without_outputs_is_refused():
    unrun = notebook(code("1 + 1"))
    with pytest.raises(chapters.ChapterError, match=r"execute\.py 90 first"):
        bundle.printable(NOTEBOOKS / "90_toy.ipynb", unrun)


@pytest.mark.parametrize("wheels", [True, False])
def test_the_readme_installs_what_is_in_the_zip(wheels):
    text = bundle.readme(wheels)
    assert ("--no-index --find-links wheels" in text) == wheels
    assert ("make bundle ARGS=--wheels" in text) != wheels
    assert "-c constraints.txt setuptools" in text  # a new environment brings an old one
    assert "{" not in text


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> zipfile.ZipFile:
    """The real bundle, with one line for each page and an empty file for the wheel."""
    out = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "printable", lambda path, notebook: path.stem)
        patch.setattr(bundle.zipfile, "ZIP_DEFLATED", zipfile.ZIP_STORED)  # takes no time
        patch.setattr(bundle, "build_wheel", lambda to: (to / "minillm_course-1.whl").touch())
        assert bundle.main(["--out", str(out)]) == 0
    (made,) = out.iterdir()
    assert made.name == f"minillm-course-{bundle.project()['version']}.zip"
    return zipfile.ZipFile(made)


@pytest.mark.slow
def test_the_zip_holds_the_course(archive):
    (top,) = {name.split("/")[0] for name in archive.namelist()}
    names = {name.removeprefix(f"{top}/") for name in archive.namelist()}
    for path in chapters.chapter_paths():
        assert {f"notebooks/{path.name}", f"html/{path.stem}.html"} <= names
    assert {
        "README.md",
        "pyproject.toml",
        "constraints.txt",
        "html/index.html",
        "html/GLOSSARY.html",
    } <= names
    assert {"notebooks/lab.py", "exercises/exercises.toml", "minillm/py.typed"} <= names
    assert sum(name.startswith("wheels/minillm_course-") for name in names) == 1
    assert not [name for name in names if "__pycache__" in name or ".egg-info" in name]
    assert not [name for name in names if name.startswith(("work/", "tests/", ".git"))]


@pytest.mark.slow
def test_our_wheel_is_built(tmp_path):
    bundle.build_wheel(tmp_path)
    (made,) = tmp_path.iterdir()
    assert zipfile.is_zipfile(made)
