#!/usr/bin/env python3
"""Pack the course into one zip for machines without a network: the package as a wheel, chapters,
exercises, and every chapter as a printable page with its outputs."""

import datetime
import html
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chapters import (
    NOTEBOOKS,
    ChapterError,
    Notebook,
    chapter_paths,
    code_cells,
    read_notebook,
    script_errors,
)
from index import PAGES, title
from minillm_exercises.cli.parser import Parser
from minillm_exercises.widgets import CSS

ROOT = NOTEBOOKS.parent
FOLDERS = ("minillm", "kernels", "exercises", "notebooks")
FILES = ("pyproject.toml", "constraints.txt", "LICENSE", "Makefile")
LEFT_OUT = shutil.ignore_patterns(
    "__pycache__", "*.pyc", ".ipynb_checkpoints", "*.egg-info", ".*", "*.part"
)
EXAMPLES = """examples:
  python notebooks/bundle.py             everything that is ours; dependencies come from elsewhere
  python notebooks/bundle.py --wheels    with all pinned dependencies (downloads them now)
"""
PRINTED = {name: name.replace("README", "index").replace(".md", ".html") for name in PAGES}
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same files make the same zip
README = """\
# minillm's course, {version}, for a machine without a network

Made on {date} on {system} with Python {python}.

* `html/index.html`: every chapter with its outputs, to read or to print. Needs nothing.
* `notebooks/`, `exercises/`: the course; `notebooks/README.md` and `exercises/README.md` say how.
* `wheels/`: the package itself{what}.

## Install

{install}

## Start

```
.venv/bin/python notebooks/lab.py                      # your copies of the chapters, in work/
.venv/bin/python -m minillm_exercises list             # the exercises
.venv/bin/python -m minillm                            # the engine's demonstration
```

On Windows it is `.venv\\Scripts\\python`. Nothing above asks the network: the models are in the
package or have random weights.
"""
WITH_WHEELS = """\
The wheels fit {system} and Python {python}; make the bundle on a machine like the one it is for.
In the unpacked folder:

```
python3 -m venv .venv
.venv/bin/python -m pip install --no-index --find-links wheels -c constraints.txt setuptools
.venv/bin/python -m pip install --no-index --find-links wheels --no-build-isolation \\
  -c constraints.txt -e ".[course]"
```"""
WITHOUT_WHEELS = """\
The dependencies are not in this bundle (`make bundle ARGS=--wheels` puts them in). Where they are
installed already, or come from a mirror of your own, in the unpacked folder:

```
python3 -m venv --system-site-packages .venv
.venv/bin/python -m pip install -c constraints.txt setuptools
.venv/bin/python -m pip install --no-build-isolation -c constraints.txt -e ".[course]"
```"""
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
STYLE = """\
body { margin: 0; color: #111; background: #fff; font: 17px/1.55 Georgia, serif; }
main { max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; font-family: system-ui, sans-serif; }
pre, code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 0.82em; }
pre { margin: 0.4em 0; white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.4; }
.prompt, .anchor-link { display: none; }
.code_cell { margin: 1em 0; padding-left: 0.6rem; border-left: 4px solid transparent; }
.code_cell pre { font-size: 0.74em; }
.input_area { background: #f5f5f5; padding: 0.1em 0.8em; }
.input_area .highlight { background: none; }
.output_subarea { padding: 0.1em 0.8em; }
blockquote { margin: 1em 0; padding: 0.1em 1em; border: 1px solid #999; }
table { border-collapse: collapse; font-size: 0.9em; }
th, td { border-bottom: 1px solid #bbb; padding: 0.2em 0.7em; text-align: left; }
img { max-width: 100%; height: auto; }
@media print {
  body { font-size: 10.5pt; }
  main { max-width: none; margin: 0; padding: 0; }
  .input_area, .output_subarea, table, blockquote, img { break-inside: avoid; }
  h1, h2, h3 { break-after: avoid; }
  a { color: inherit; text-decoration: none; }
}
"""


def project() -> dict[str, Any]:
    """The table [project] of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def printable(path: Path, notebook: Notebook) -> str:
    """One chapter as a page that needs nothing else: outputs and pictures inside, alternative
    texts kept, nothing loaded from a network.

    Raises:
        ChapterError: the chapter has not been executed.
    """
    import nbformat
    from bs4 import BeautifulSoup
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter

    if not any(cell["outputs"] for _, cell in code_cells(notebook)):
        number = path.stem.partition("_")[0]
        raise ChapterError(
            f"{path.name} has no outputs to print: run python notebooks/execute.py {number} first."
        )
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True)
    body, _ = exporter.from_notebook_node(nbformat.from_dict(notebook))
    page = BeautifulSoup(body, "html.parser")
    for script in page.find_all("script"):
        script.decompose()
    for code in page.select(".celltag_facts .input, .celltag_setup .input"):
        code.wrap(page.new_tag("details")).insert(0, fold := page.new_tag("summary"))
        fold.string = "Code"
    style = HtmlFormatter(style="bw").get_style_defs(".highlight")
    style += STYLE + CSS.read_text(encoding="utf-8")
    return PAGE.format(title=html.escape(title(notebook)), style=style, body=page)


def page_of(markdown: str) -> str:
    """A page beside the chapters, such as their index, with links to the printable ones."""
    from nbconvert.filters import markdown2html

    heading = re.search(r"^# +(.+)$", markdown, re.MULTILINE)
    linked = re.sub(r"\]\((\d\d[a-z]?_\w+)\.ipynb\)", r"](\1.html)", markdown)
    for name, target in PRINTED.items():
        linked = linked.replace(f"]({name})", f"]({target})")
    name = heading[1] if heading else "The course"
    return PAGE.format(title=html.escape(name), style=STYLE, body=markdown2html(linked))


def write_pages(folder: Path) -> int:
    """Write all pages into `folder` and return their number."""
    folder.mkdir(parents=True)
    paths = chapter_paths()
    for path in paths:
        page = printable(path, read_notebook(path))
        (folder / f"{path.stem}.html").write_text(page, encoding="utf-8")
    for name, target in PRINTED.items():
        page = page_of((NOTEBOOKS / name).read_text(encoding="utf-8"))
        (folder / target).write_text(page, encoding="utf-8")
    if (NOTEBOOKS / "figures").exists():
        shutil.copytree(NOTEBOOKS / "figures", folder / "figures")
    return len(paths)


def build_wheel(folder: Path) -> None:
    """Build our wheel into `folder` from a copy, with the setuptools at hand and no network."""
    with tempfile.TemporaryDirectory(prefix="minillm-wheel-") as name:
        for part in FOLDERS[:3]:
            shutil.copytree(ROOT / part, Path(name, part), ignore=LEFT_OUT)
        for part in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / part, name)
        build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
        called([sys.executable, "-c", build, str(folder)], "build the wheel", cwd=Path(name))


def download_dependencies(folder: Path) -> None:
    """Download what the course needs, as pinned, for this platform and Python."""
    about = project()
    needed = [*about["dependencies"], *about["optional-dependencies"]["course"], "setuptools"]
    words = [sys.executable, "-m", "pip", "download", "--only-binary", ":all:"]
    words += ["-c", str(ROOT / "constraints.txt"), "-d", str(folder), *needed]
    called(words, "download the dependencies", cwd=ROOT)


def called(words: list[str], what: str, cwd: Path) -> None:
    """Run a command.

    Raises:
        ChapterError: it failed; the message ends with what it said.
    """
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
        raise ChapterError(f"Could not {what}:\n{tail}")


def readme(wheels: bool) -> str:
    """How to install what is in the zip."""
    facts = {
        "version": project()["version"],
        "date": datetime.date.today().isoformat(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    }
    install = (WITH_WHEELS if wheels else WITHOUT_WHEELS).format(**facts)
    what = " and everything it depends on" if wheels else ""
    return README.format(install=install, what=what, **facts)


def pack(folder: Path, archive: Path) -> None:
    """Zip `folder`, in a fixed order and with fixed times."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    part = archive.with_suffix(".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as out:
        for path in sorted(filter(Path.is_file, folder.rglob("*"))):
            entry = zipfile.ZipInfo(path.relative_to(folder.parent).as_posix(), EPOCH)
            entry.external_attr = (path.stat().st_mode & 0o777) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(entry, path.read_bytes())
    part.replace(archive)


def make(folder: Path, wheels: bool) -> Iterator[str]:
    """Fill `folder` with the bundle, saying what was done."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=LEFT_OUT)
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    (folder / "README.md").write_text(readme(wheels), encoding="utf-8")
    yield f"{write_pages(folder / 'html')} chapters as pages"
    (folder / "wheels").mkdir()
    build_wheel(folder / "wheels")
    yield "our wheel"
    if wheels:
        download_dependencies(folder / "wheels")
        yield f"{len(list((folder / 'wheels').iterdir())) - 1} dependencies"


def main(argv: list[str] | None = None) -> int:
    """Make the zip."""
    parser = Parser(prog="bundle.py", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--wheels", action="store_true", help="download all pinned dependencies")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the zip: dist/")
    given = parser.parse_args(argv)
    name = f"{project()['name']}-{project()['version']}"
    with tempfile.TemporaryDirectory(prefix="minillm-bundle-") as place:
        folder = Path(place, name)
        folder.mkdir()
        for line in make(folder, given.wheels):
            sys.stdout.write(f"  {line}\n")
            sys.stdout.flush()
        archive = given.out / f"{name}.zip"
        pack(folder, archive)
    sys.stdout.write(f"{archive} ({archive.stat().st_size / 2**20:.1f} MiB)\n")
    return 0


if __name__ == "__main__":
    sys.exit(script_errors(main))
