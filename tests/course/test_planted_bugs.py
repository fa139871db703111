"""Each chapter's facts catch bugs in the engine: `planted/NN.py`, and where a chapter has more than
one mechanism also `planted/NN_other.py`, is run before its first cell.

That the facts hold without the bug is what the notebooks' own run shows. A cell that raises is no
proof: only a fact that was computed and came out differently is.
"""

import ast
from pathlib import Path

import pytest
from forked_chapter import run_cells
from notebook_chapter import chapters
from toy_notebooks import code, notebook

PLANTED = Path(__file__).parent / "planted"


def facts_that_change(committed: chapters.Notebook, bug: str, folder: Path) -> dict[str, tuple]:
    """The first facts that come out differently with `bug`: name to (committed, with the bug)."""
    right = {
        name: value
        for _, cell in chapters.code_cells(committed)
        if chapters.is_fact_cell(cell)
        for name, value in chapters.parse_facts(chapters.stdout(cell["outputs"])).items()
    }
    assert right, "No fact is committed: run python notebooks/execute.py first."
    cells = [cell for _, cell in chapters.code_cells(committed)]
    sources = [bug, *(cell["source"] for cell in cells)]
    for index, printed, error in run_cells(sources, folder, MINILLM_QUICK="1"):
        if index == 0:
            assert not error, f"The planted code itself fails: {error}"
        elif chapters.is_fact_cell(cells[index - 1]):
            now = chapters.parse_facts(printed)
            pairs = {name: (right[name], now[name]) for name in now if name in right}
            if changed := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
                return changed
    return {}


@pytest.mark.parametrize("path", chapters.chapter_paths(), ids=lambda path: path.stem)
def test_a_bug_is_planted_for(path: Path) -> None:
    planted = PLANTED / f"{path.stem[:2]}.py"
    assert planted.exists(), f"plant one bug of the engine for {path.stem} in {planted.name}"


# A run of a chapter takes a quarter of a minute or more: `make test` plants the first bug of each.
EVERY = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if "_" in path.stem else [])
    for path in sorted(PLANTED.glob("*.py"))
]


@pytest.mark.mutation
@pytest.mark.parametrize("planted", EVERY)
def test_a_planted_bug_changes_a_fact(planted: Path, tmp_path: Path) -> None:
    (path,) = chapters.chapter_paths(wanted=(planted.stem[:2],))
    bug = planted.read_text("utf-8")
    says = ast.get_docstring(ast.parse(bug))
    assert says, f"{planted.name} says in its docstring what the bug is"
    if not facts_that_change(chapters.read_notebook(path), bug, tmp_path):
        pytest.fail(
            f"The chapter states the same facts with this bug in the engine: {says}\n"
            f"State a fact that the bug changes in {path.name}, or plant one that matters.",
            pytrace=False,
        )


SUM = code(
    'import math\nprint("root:", math.isqrt(49))\nprint("sum:", 3 + 4)',
    "facts",
    "nbval-check-output",
    says="root: 7\nsum: 7\n",
)


def test_a_bug_that_matters_is_seen(tmp_path):
    bug = '"""Roots are one too small."""\nimport math\nroot = math.isqrt\n'
    bug += "math.isqrt = lambda n: root(n) - 1"
    assert facts_that_change(notebook(SUM), bug, tmp_path) == {"root": ("7", "6")}


def test_a_bug_that_only_makes_cells_raise_is_not(tmp_path):
    """Otherwise a bug that breaks the imports would pass for one that the facts catch."""
    bug = '"""Roots are gone."""\nimport math\ndel math.isqrt'
    assert facts_that_change(notebook(SUM), bug, tmp_path) == {}


def test_planted_code_that_fails_is_reported_as_such(tmp_path):
    with pytest.raises(AssertionError, match=r"planted code itself fails: .*sqr'"):
        facts_that_change(notebook(SUM), '"""Typo."""\nimport math\nmath.sqr += 1', tmp_path)
