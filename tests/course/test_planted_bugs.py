"""Each chapter's facts catch the bugs of `planted.py`, planted before its first cell.

That the facts hold without the bug is what the notebooks' own run shows. A cell that raises is no
proof: only a fact that was computed and came out differently is.
"""

from pathlib import Path

import pytest
from jupyter_client.provisioning import KernelProvisionerFactory
from notebook_chapter import chapters, forked
from planted import BUGS
from toy_notebooks import code, notebook


def stated(cell: chapters.Notebook) -> dict[str, str]:
    """The facts of one cell, with their units."""
    return chapters.parse_facts(chapters.stdout(cell["outputs"]) * chapters.is_fact_cell(cell))


def facts_that_change(committed: chapters.Notebook, bug: str, folder: Path) -> dict[str, tuple]:
    """The first facts that come out differently with `bug`: name to (committed, with the bug)."""
    right: dict[str, str] = {}
    for _, cell in chapters.code_cells(committed):
        right |= stated(cell)
    assert right, "No fact is committed: run python notebooks/execute.py first."
    changed: dict[str, tuple] = {}

    def seen(cell: chapters.Notebook) -> bool:
        errors = [o["evalue"] for o in cell["outputs"] if o["output_type"] == "error"]
        assert not (errors and cell["source"] == bug), f"The planted code itself fails: {errors}"
        pairs = {name: (right.get(name, now), now) for name, now in stated(cell).items()}
        changed.update({name: pair for name, pair in pairs.items() if pair[0] != pair[1]})
        return bool(changed)

    (folder / "cwd").mkdir()
    forked.register()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelProvisionerFactory.instance(), "default_provisioner_name", forked.NAME)
        chapters.run(committed, folder / "cwd", before=bug, until=seen, MINILLM_QUICK="1")
    return changed


def test_a_bug_is_planted_for_every_chapter() -> None:
    assert {chapters.number(path) for path in chapters.chapter_paths()} <= set(BUGS)


# A run of a chapter takes a quarter of a minute or more: the others of each chapter are slow.
@pytest.mark.mutation
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("_" in name)) for name in sorted(BUGS)]
)
def test_a_planted_bug_changes_a_fact(name: str, tmp_path: Path) -> None:
    (path,) = chapters.chapter_paths(wanted=(name.partition("_")[0],))
    bug = f"from planted import plant\nplant({name!r})"  # a fork finds what this process finds
    if not facts_that_change(chapters.read_notebook(path), bug, tmp_path):
        pytest.fail(
            f"The chapter states the same facts with the bug {name!r} of planted.py in the engine. "
            f"State a fact that the bug changes in {path.name}, or plant one that matters.",
            pytrace=False,
        )


SUM = code(
    'import math\nprint("root:", math.isqrt(49))\nprint("sum:", 3 + 4)',
    "facts",
    "nbval-check-output",
    says="root: 7\nsum: 7\n",
)


@pytest.mark.mutation
def test_a_bug_that_only_makes_cells_raise_is_not(tmp_path):
    """Otherwise a bug that breaks the imports would pass for one that the facts catch."""
    bug = "import math\ndel math.isqrt"
    assert facts_that_change(notebook(SUM), bug, tmp_path) == {}


@pytest.mark.mutation
def test_planted_code_that_fails_is_reported_as_such(tmp_path):
    with pytest.raises(AssertionError, match=r"planted code itself fails: .*sqr'"):
        facts_that_change(notebook(SUM), "import math\nmath.sqr += 1", tmp_path)
