"""A chapter as the rules see it: the notebook, its measured results, what it may quote."""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))  # its scripts are run as files, so they are no package

import bundle  # noqa: E402, F401
import chapters  # noqa: E402
import execute  # noqa: E402, F401
import forked  # noqa: E402, F401
import index  # noqa: E402, F401
import lab  # noqa: E402, F401
import prose  # noqa: E402
import slides  # noqa: E402, F401
import stale  # noqa: E402, F401

Violations = Iterator[tuple[int, str]]  # position of the cell or -1, what to repair


@dataclass(frozen=True)
class Chapter:
    """One notebook with what its numbers may be bound to."""

    stem: str
    notebook: dict[str, Any]
    results: Mapping[str, Any] = field(default_factory=dict)
    claims: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0

    @classmethod
    def load(cls, path: Path) -> "Chapter":
        """The committed chapter of that file."""
        folder, stem = path.parent, path.stem
        results, claims = prose.load_results(stem, folder), prose.load_claims(folder)
        return cls(stem, chapters.read_notebook(path), results, claims, path.stat().st_size)

    @property
    def number(self) -> str:
        """What it is called by: 03, 01b."""
        return chapters.number(Path(self.stem))

    @property
    def cells(self) -> list[dict[str, Any]]:
        """All cells in order."""
        return self.notebook["cells"]

    @property
    def about(self) -> dict[str, Any]:
        """The chapter's own metadata: chapter, question, minutes, needs, waived."""
        return self.notebook["metadata"].get("minillm", {})

    @property
    def sources(self) -> prose.Sources:
        """What a number in the prose may be bound to."""
        return prose.Sources.of(self.notebook, self.results, self.claims)

    def code(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Position and cell of the code cells."""
        return chapters.code_cells(self.notebook)

    def trees(self) -> Iterator[tuple[int, dict[str, Any], ast.Module]]:
        """The code cells with their syntax, which is empty where there is none."""
        for at, cell in self.code():
            yield at, cell, tree_of(cell["source"])

    def calls(self, *names: str) -> Iterator[tuple[int, ast.Call]]:
        """The calls of a function or method of one of these names, with the cell's position."""
        for at, _, tree in self.trees():
            yield from ((at, call) for call in called(tree, *names))


@cache
def tree_of(source: str) -> ast.Module:
    """The syntax of a cell, which several rules ask for; they do not change it."""
    return chapters.parsed({"source": source}) or ast.Module([], [])


def called(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    """The calls of a function or method of one of these names."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return (one for one in calls if getattr(one.func, "attr", getattr(one.func, "id", "")) in names)


def names_in(tree: ast.AST) -> set[str]:
    """The names an expression reads."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def rerun(chapter: Chapter) -> str:
    """The command that executes the chapter."""
    return f"python notebooks/execute.py {chapter.number}"


def report(chapter: Chapter, rule: Callable[[Chapter], Violations]) -> list[str]:
    """One line per violation: the cell as the reader of the failure finds it, what to repair."""
    lines = []
    for position, wrong in rule(chapter):
        if position < 0:
            lines.append(f"{chapter.stem}: {wrong}")
            continue
        cell = chapter.cells[position]
        first = next((line for line in cell["source"].splitlines() if line.strip()), "")
        where = f"cell {position} ({cell['cell_type']}, {first[:40]!r})"
        lines.append(f"{chapter.stem} {where}: {wrong}")
    return lines
