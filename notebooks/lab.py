#!/usr/bin/env python3
"""Open the course in JupyterLab, on your own copies of the chapters in work/notebooks/.

The copies have no outputs, so no answer is on the page before you ask for it, and the tracked
files stay as they are, so `git pull` always works. What you edited or ran is never overwritten.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from chapters import (
    NOTEBOOKS,
    ChapterError,
    Notebook,
    calm_threads,
    chapter_paths,
    read_notebook,
    script_errors,
    tags,
    write_notebook,
    write_text,
)
from index import PAGES
from minillm_exercises import turns
from minillm_exercises.cli.parser import Parser
from minillm_exercises.workspace import work_root

EXAMPLES = """examples:
  python notebooks/lab.py                  continue where you were, or start at the index
  python notebooks/lab.py --chapter 03     open chapter 03
  python notebooks/lab.py --index          open the index whatever you did last
  python notebooks/lab.py --no-browser     print the address instead of opening a browser
  python notebooks/lab.py --prepare-only   only make or update the copies
"""
ROOT = NOTEBOOKS.parent
CODE = "(?:minillm|kernels|exercises)"  # folders that chapters link to
# The index opens as a page, not as its source, and nothing asks to be allowed to fetch news.
SETTINGS = {
    "@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {"markdown": "Markdown Preview"}},
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
    # Beside the list of files a window of usual width shows fewer than 100 characters of a line.
    "@jupyterlab/notebook-extension:tracker": {"codeCellConfig": {"lineWrap": True}},
}


def stripped(notebook: Notebook, folder: Path) -> Notebook:
    """The chapter before it is run, for a learner's `folder`."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = relinked(cell["source"], folder)
        elif cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
            if "turn" in tags(cell):
                cell["source"] = turns.blanked(cell["source"])
    return notebook


def relinked(text: str, folder: Path) -> str:
    """A page's links to the engine's code as JupyterLab opens them from a copy in `folder`: at a
    line counted from 0. Names of files, if the folder is not in the checkout, JupyterLab's root."""
    if folder.is_relative_to(ROOT):
        up = os.path.relpath(ROOT, folder)
        link = re.compile(rf"\]\(\.\./({CODE}/[^)#]+)(?:#L(\d+)-L\d+)?")
        return link.sub(
            lambda m: f"]({up}/{m[1]}" + (f"#line={int(m[2]) - 1}" if m[2] else ""), text
        )
    text = re.sub(rf"\[`[^`\]]+`\]\(\.\./({CODE}/[^)#]+)\)", r"`\1`", text)
    return re.sub(rf"\[([^\]]+)\]\(\.\./({CODE}/[^)#]+)[^)]*\)", r"\1 (`\2`)", text)


def digest(notebook: Notebook) -> str:
    """A hash of what a person wrote or ran: sources and outputs. Opening a notebook and saving it
    changes its metadata, which is no work to protect."""
    parts = [
        [cell["cell_type"], cell["source"], bool(cell.get("outputs"))] for cell in notebook["cells"]
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass
class Desk:
    """The learner's folder of notebooks: `copied` is the digest of each file as it was copied."""

    folder: Path
    copied: dict[str, str]

    @classmethod
    def at(cls, folder: Path) -> "Desk":
        """The desk in `folder`; one whose record is lost or damaged takes every copy for edited."""
        try:
            copied = json.loads((folder / ".copied.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            copied = {}
        return cls(folder, copied if isinstance(copied, dict) else {})

    def touched(self, name: str) -> bool:
        """Whether the file is there and differs from what was copied."""
        path = self.folder / name
        if not path.exists():
            return False
        try:
            return digest(read_notebook(path)) != self.copied.get(name)
        except ChapterError:  # the learner changed it: keep the file
            return True

    def put(self, name: str, notebook: Notebook) -> None:
        """Write a copy and remember it."""
        write_notebook(self.folder / name, notebook)
        self.copied[name] = digest(notebook)

    def update(self, path: Path) -> str:
        """Bring one chapter's copy up to date, and say in a line what was done ("" if nothing)."""
        fresh = stripped(read_notebook(path), self.folder)
        new = f"{path.stem}.new.ipynb"
        there = (self.folder / path.name).exists()
        if not self.touched(path.name):
            changed = self.copied.get(path.name) != digest(fresh)
            if not there or changed:
                self.put(path.name, fresh)
            return f"{path.stem}: updated" if there and changed else ""
        seen = (self.copied.get(path.name), self.copied.get(new))
        if digest(fresh) in seen or self.touched(new):
            return ""
        self.put(new, fresh)
        return (
            f"{path.stem}: there is a newer version. Yours was left as it is; the new one is "
            f"beside it as {new}."
        )

    def last_worked_on(self, paths: list[Path]) -> str | None:
        """The copy that was edited or run most recently."""
        mine = [path.name for path in paths if self.touched(path.name)]
        return max(mine, key=lambda name: (self.folder / name).stat().st_mtime, default=None)


def prepare(source: Path, folder: Path) -> tuple[Desk, list[str]]:
    """Make or update the copies in `folder`; returns the desk and what was said.

    Raises:
        ChapterError: the folder cannot be written.
    """
    desk = Desk.at(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        first = not list(folder.glob("*.ipynb"))
        said = [line for path in chapter_paths(source) if (line := desk.update(path))]
        for path in [*(source / name for name in PAGES), *source.glob("figures/*.*")]:
            if path.exists():
                place = folder / path.relative_to(source)
                place.parent.mkdir(exist_ok=True)
                if path.suffix == ".md":
                    write_text(place, relinked(path.read_text(encoding="utf-8"), folder))
                else:
                    shutil.copyfile(path, place)
        settings = folder / ".jupyter" / "labconfig" / "default_setting_overrides.json"
        write_text(settings, json.dumps(SETTINGS, indent=1) + "\n")
        write_text(folder / ".copied.json", json.dumps(desk.copied, indent=1) + "\n")
    except OSError as error:
        raise ChapterError(
            f"The notebooks could not be copied to {folder}: {error.strerror}. Set MINILLM_WORK to "
            f"a folder that can be written."
        ) from None
    return desk, [f"Copied the chapters to {folder}.", *said] if first else said


def where_to_start(desk: Desk, source: Path, chapter: str | None, index: bool) -> tuple[str, str]:
    """The file to open and the line that says why.

    Raises:
        ChapterError: there is no such chapter.
    """
    if chapter is not None:
        (path,) = chapter_paths(source, (chapter,))
        return path.name, f"Opening {path.name}."
    last = None if index else desk.last_worked_on(chapter_paths(source))
    if last is None:
        return "README.md", "Opening the index."
    return last, f"You were last in {Path(last).stem}: opening it (--index opens the index)."


def command(folder: Path, name: str, browser: bool, port: int | None) -> list[str]:
    """The command that starts JupyterLab on one file."""
    root = ROOT if folder.is_relative_to(ROOT) else folder
    page = quote((folder / name).relative_to(root).as_posix())
    words = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={root}"]
    words += [f"--LabApp.default_url=/lab/tree/{page}"]
    words += [f"--FileCheckpoints.checkpoint_dir={folder / '.checkpoints'}"]  # none beside code
    words += ["--LabApp.expose_app_in_browser=True"]  # the button that puts a starter into a cell
    words += [] if browser else ["--no-browser"]
    words += [] if port is None else [f"--port={port}"]
    # In a container everybody is root, and the server still listens on this machine only.
    return words + ["--allow-root"] * (hasattr(os, "geteuid") and os.geteuid() == 0)


def wait(words: list[str], env: dict[str, str]) -> int:
    """Run the server to its end. Control-C is the server's, which asks whether it is meant."""
    server = subprocess.Popen(words, env=env)
    while True:
        try:
            return server.wait()
        except KeyboardInterrupt:
            continue


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog="lab.py", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--chapter", metavar="NN", help="open this chapter")
    parser.add_argument("--index", action="store_true", help="open the index")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--port", type=int, help="the server's port (8888, or the next free one)")
    parser.add_argument("--prepare-only", action="store_true", help="start nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Prepare the copies and start JupyterLab; its exit status."""
    given = arguments(argv)
    folder = (work_root() / "notebooks").resolve()
    desk, said = prepare(NOTEBOOKS, folder)
    name, why = where_to_start(desk, NOTEBOOKS, given.chapter, given.index)
    sys.stdout.write(
        "".join(f"{line}\n" for line in [*said, *([] if given.prepare_only else [why])])
    )
    sys.stdout.flush()
    if given.prepare_only:
        return 0
    if importlib.util.find_spec("jupyterlab") is None:
        raise ChapterError(
            "JupyterLab is not installed in this environment: run `make lab`, or "
            'pip install -c constraints.txt -e ".[course]". The copies are ready in any case, for '
            "VS Code or another editor of notebooks."
        )
    paths = [str(folder / ".jupyter"), os.environ.get("JUPYTER_CONFIG_PATH", "")]
    found = {"JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, paths))}
    env = os.environ | calm_threads() | found
    return wait(command(folder, name, not given.no_browser, given.port), env)


if __name__ == "__main__":
    sys.exit(script_errors(main))
