"""Whether a chapter's measured numbers are older than the code that they time.

A chapter names this code in its metadata (minillm.timed): functions and classes of Python, and
files. `execute.py` stores a fingerprint of each beside the results: a hash of the syntax tree
without docstrings, or of a C file without comments. After a change, `execute.py --stale NN` runs
the chapter again and compares its measured numbers with the recorded ones. If all of them are
within their bands (minillm.bands, a factor for each name), the fingerprints are renewed and the
page stays. Otherwise the chapter has to be executed again.
"""

import ast
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chapters import NOTEBOOKS, ChapterError

ROOT = NOTEBOOKS.parent
READ = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/]+)\.py#L\d+-L\d+\)")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def fingerprint(name: str, root: Path = ROOT) -> str:
    """A hash of one timed thing: "minillm.layers.rope.RotaryEmbedding", "minillm/ops/c/decode.c".

    Raises:
        ChapterError: there is no such function, class or file.
    """
    if "/" in name:
        path = root / name
        if not path.is_file():
            raise ChapterError(f"minillm.timed names {name}, and there is no such file.")
        text = " ".join(COMMENT.sub(" ", path.read_text(encoding="utf-8")).split())
    else:
        text = ast.dump(_without_docstrings(_find(name, root)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _find(name: str, root: Path) -> ast.AST:
    """The definition in the module whose file is the longest beginning of the dotted name."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        place = root.joinpath(*parts[:length])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                node: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
                for part in parts[length:]:
                    node = _member(node, part, name)
                return node
    raise ChapterError(f"A chapter names {name}, and there is no such module.")


def pointed(text: str, root: Path = ROOT) -> str:
    """A page whose links to classes and functions, [`Name`](../file.py#L1-L2), have the lines that
    these have now; ChapterError if one of them does not exist."""

    def place(match: re.Match[str]) -> str:
        node: Any = _find(f"{match[2].replace('/', '.')}.{match[1]}", root)
        return f"[`{match[1]}`](../{match[2]}.py#L{node.lineno}-L{node.end_lineno})"

    return READ.sub(place, text)


def _member(node: ast.AST, part: str, name: str) -> ast.AST:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for child in getattr(node, "body", ()):
        if isinstance(child, kinds) and child.name == part:
            return child
    raise ChapterError(f"A chapter names {name}, and there is no {part!r} in it.")


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                node.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def fingerprints(about: Mapping[str, Any], root: Path = ROOT) -> dict[str, str]:
    """The fingerprint of everything that a chapter's metadata names as timed."""
    return {name: fingerprint(name, root) for name in about.get("timed", ())}


def changed(about: Mapping[str, Any], results: Mapping[str, Any], root: Path = ROOT) -> list[str]:
    """The timed things that differ from those that the results were measured with."""
    known = results.get("timed", {})
    return [name for name, now in fingerprints(about, root).items() if known.get(name) != now]


def outside(
    bands: Mapping[str, float], old: Mapping[str, Any], new: Mapping[str, Any]
) -> list[str]:
    """One sentence for each measured number that left its band, a factor in both directions."""
    found = []
    for name, band in bands.items():
        if name not in old or name not in new:
            found.append(f"{name!r} has a band, but was not recorded by the chapter")
            continue
        was, now = old[name]["value"], new[name]["value"]
        if not was / band <= now <= was * band:
            found.append(f"{name!r} was {was:.3g}, is {now:.3g}; its band is a factor of {band}")
    return found
