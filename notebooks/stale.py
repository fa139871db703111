#!/usr/bin/env python3
"""Find out whether a chapter's measured numbers are older than the code that they time.

A chapter names this code in its metadata (minillm.timed): functions and classes of Python, and
files. `execute.py` stores a fingerprint of each beside the results: a hash of the syntax tree
without docstrings, or of a C file without comments. After a change, this script runs the chapter
again and compares its measured numbers with the recorded ones. If all of them are within their
bands (minillm.bands, a factor for each name), the fingerprints are renewed and the page stays.
Otherwise the chapter has to be executed again.
"""

import argparse
import ast
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prose
from chapters import (
    NOTEBOOKS,
    ChapterError,
    chapter_paths,
    read_notebook,
    run,
    script_errors,
    write_text,
)

ROOT = NOTEBOOKS.parent
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
EXAMPLES = """examples:
  python notebooks/stale.py            list the chapters whose numbers are older than their code
  python notebooks/stale.py 03         measure chapter 03 again, and compare with its results
"""


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
    raise ChapterError(f"minillm.timed names {name}, and there is no such module.")


def _member(node: ast.AST, part: str, name: str) -> ast.AST:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for child in getattr(node, "body", ()):
        if isinstance(child, kinds) and child.name == part:
            return child
    raise ChapterError(f"minillm.timed names {name}, and there is no {part!r} in it.")


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


def measured_again(path: Path, timeout: float) -> dict[str, Any]:
    """The numbers that the chapter records when it runs once more.

    Raises:
        ChapterError: a cell failed, or other programs disturbed the run.
    """
    from execute import read_records, undisturbed

    with tempfile.TemporaryDirectory(prefix="minillm-chapter-") as name:
        records = Path(name, "records.jsonl")
        Path(name, "cwd").mkdir()
        settings = {"MINILLM_RESULTS": str(records), "MINILLM_QUICK": ""}
        run(read_notebook(path), Path(name, "cwd"), timeout=timeout, **settings)
        return undisturbed(path.name, read_records(records))


def renew(path: Path, timeout: float = 300) -> list[str]:
    """Measure a chapter again and renew its fingerprints if all numbers are within their bands.

    Returns one sentence for each number outside of its band; then nothing was written.

    Raises:
        ChapterError: there is nothing to compare with, or a cell failed.
    """
    about = read_notebook(path)["metadata"].get("minillm", {})
    results = prose.load_results(path.stem, path.parent)
    if not results or not about.get("bands"):
        raise ChapterError(
            f"{path.stem} has no recorded results, or no bands to compare new ones with: execute "
            f"it again: python notebooks/execute.py {path.stem[:2]}"
        )
    found = outside(about["bands"], results["values"], measured_again(path, timeout))
    if not found:
        results["timed"] = fingerprints(about)
        where = path.parent / "results" / f"{path.stem}.json"
        write_text(where, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    return found


def main(argv: list[str] | None = None) -> int:
    """List stale chapters, or measure those that the command line names; 0 if none is stale."""
    parser = argparse.ArgumentParser(
        prog="stale.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("chapters", nargs="*", help="numbers or files; default: only list")
    given = parser.parse_args(argv)
    stale = {}
    for path in chapter_paths(NOTEBOOKS, tuple(given.chapters)):
        about = read_notebook(path)["metadata"].get("minillm", {})
        if names := changed(about, prose.load_results(path.stem)):
            stale[path] = names
            sys.stdout.write(f"{path.stem}: changed since it was measured: {', '.join(names)}\n")
    if not stale:
        sys.stdout.write("No chapter's numbers are older than the code they time.\n")
        return 0
    if not given.chapters:
        sys.stdout.write("Measure again: make stale CHAPTER=NN\n")
        return 1
    bad = 0
    for path in stale:
        found = renew(path)
        bad += len(found)
        for sentence in found:
            sys.stdout.write(f"{path.stem}: {sentence}.\n")
        said = f"execute it again: python notebooks/execute.py {path.stem[:2]}"
        done = "all numbers are within their bands; fingerprints renewed"
        sys.stdout.write(f"{path.stem}: {said if found else done}.\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(script_errors(main))
