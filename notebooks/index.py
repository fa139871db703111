"""The index page of the course, notebooks/README.md, generated from the chapters themselves."""

import base64
import html
import re
from collections.abc import Iterator
from pathlib import Path

from chapters import (
    NOTEBOOKS,
    Notebook,
    chapter_paths,
    code_cells,
    number,
    read_notebook,
    tags,
    write_text,
)

PARTS = (
    ("00", "I. What a token costs"),
    ("05", "II. Many requests"),
    ("10", "III. Kernels"),
    ("13", "IV. Fewer bytes, more tokens per step"),
    ("19", "V. More machines, real users"),
)
CORE_PATH = ("00", "01", "01b", "03", "05", "06", "07", "10")
MAP = NOTEBOOKS.parent / ".github" / "request.svg"
BOX = re.compile(r'(<rect[^>]+fill=")#\w+("[^>]*)(/>\n<text[^>]+class="t")(>)([^<]+)(?=<)')
NEAR = {"kernels": "ops", "quantization": "layers", "structured": "sampling"}
RESERVED = {"17": "speculation with trees", "21": "prefill and decode on separate devices"}
PAGES = ("README.md", "SELFTEST.md", "GLOSSARY.md")  # what a reader needs beside the chapters
TOP = """\
# The course

Each chapter asks one question, lets you predict the answer, and then measures or counts it on your
machine. Read them in order the first time. No chapter needs another chapter's results to run.

```
make lab          # your copies of the chapters, in work/notebooks/, opened in JupyterLab
```

Without make: `python notebooks/lab.py`. [Ten questions](SELFTEST.md) tell whether you know enough
of Python's tensors. The [glossary](GLOSSARY.md) explains each term in one sentence.

How a chapter works:

* A coloured bar names what you ran: a prediction, your turn, a result, a fact, an exercise, a quiz.
* **Predict** before you scroll: a prediction stays in your folder, and is shown beside the result.
* **Your turn** cells have dots to replace, and check them; `turn("03.put", "give up")` shows ours.
* **Read now** links to the engine's code, with two questions: JupyterLab opens it at the line.
* `task("e03.1")` shows an exercise, with a button that puts its starter into the next cell, and
  `check("e03.1")` grades it. In a terminal: `python -m minillm_exercises list`. The exercises of
  chapters 03, 06, 07 and 09 fit together: `python -m minillm_exercises engine` runs the small
  engine that you have written.
* A line `measured: name = value` comes from a clock, and is different on each machine. A line
  `name: value` was counted or computed, and is the same on every machine; a test compares it.
  "Simulated" in a name means a virtual clock or a model of a device.
* After a change of the engine, `make stale CHAPTER=03` tells whether a chapter's measured numbers
  still hold.

The files beside this page show the outputs of one machine, which `results/` describes. Open your
own copies to predict: they have no outputs yet.
"""
BOTTOM = """\

*This page is generated from the chapters: `python notebooks/execute.py --index`.*
"""


def title(notebook: Notebook) -> str:
    """The chapter's title, its first heading."""
    for cell in notebook["cells"]:
        if match := re.search(r"^# +(.+)$", cell["source"], re.MULTILINE):
            return re.sub(r"<[^>]+>", "", match[1]).strip()
    return "Untitled"


def plain(text: str) -> str:
    """The words of a text, to see whether two say the same."""
    return " ".join(re.findall(r"\w+", text.lower()))


def exercises(notebook: Notebook) -> list[str]:
    """Names of the exercises that the chapter checks, in order: e03.1, e03.2."""
    code = "\n".join(cell["source"] for _, cell in code_cells(notebook))
    return list(dict.fromkeys(re.findall(r"\bcheck\(\s*[\"'](e\d\d\.\d)[\"']", code)))


def cover(notebook: Notebook) -> tuple[bytes, str] | None:
    """The PNG that stands for the chapter and its alternative text: the picture of the cell tagged
    `cover`, else the first one."""
    cells = [cell for _, cell in code_cells(notebook)]
    for cell in sorted(cells, key=lambda cell: "cover" not in tags(cell)):
        for output in cell["outputs"]:
            if picture := output.get("data", {}).get("image/png"):
                alt = output.get("metadata", {}).get("image/png", {}).get("alt", "")
                return base64.b64decode("".join(picture)), " ".join(alt.split())
    return None


def way(notebook: Notebook) -> bytes:
    """A request's way through the engine; the rooms that the chapter links to are coloured."""
    text = " ".join(cell["source"] for cell in notebook["cells"])
    names = re.findall(r"\]\(\.\./(?:minillm/)?(\w+)", text)
    rooms = {NEAR.get(name, name) for name in names}

    def painted(box: re.Match[str]) -> str:
        if rooms.isdisjoint(re.findall(r"\w+", box[5])):
            return f'{box[1]}#ffffff{box[2]}{box[3]} opacity=".6"{box[4]}{box[5]}'
        return f'{box[1]}#ffd8a8{box[2]} stroke-width="3"{box[3]}{box[4]}{box[5]}'

    picture = MAP.read_text("utf-8").split('<rect x="36" y="388"')[0].replace("430", "384")
    return (BOX.sub(painted, picture) + "</svg>\n").encode()


def section(path: Path, notebook: Notebook) -> Iterator[str]:
    """The lines of one chapter."""
    about = notebook["metadata"].get("minillm", {})
    name = number(path)
    yield f"### [{name} · {title(notebook)}]({path.name})"
    yield ""
    if plain(about.get("question", "")) not in plain(title(notebook)):
        yield f"**{about['question']}**"
        yield ""
    needs = ", ".join(about.get("needs", ())) or "nothing"
    facts = [f"{about.get('minutes', '?')} minutes", f"needs {needs}"]
    if names := exercises(notebook):
        facts.append("exercises " + ", ".join(names))
    yield " · ".join(facts)
    if picture := cover(notebook):
        yield ""
        alt = html.escape(picture[1]).replace("\n", " ")
        yield f'<img src="figures/{name}.png" alt="{alt}" width="560">'
    yield ""


def page(chapters: list[tuple[Path, Notebook]]) -> str:
    """The whole page."""
    there = {number(path): path.name for path, _ in chapters}
    core = " → ".join(f"[{n}]({there[n]})" for n in CORE_PATH if n in there)
    gaps = ", ".join(f"{n} ({name})" for n, name in RESERVED.items() if n not in there)
    told = f"Numbers that are missing are reserved: {gaps}. No other chapter needs them.\n"
    lines = [TOP, *[told] * bool(gaps)]
    if core:
        known = [book for path, book in chapters if number(path) in CORE_PATH]
        minutes = sum(book["metadata"].get("minillm", {}).get("minutes", 0) for book in known)
        lines += [f"**The core path**: {core}, {minutes} minutes together.", ""]
    ends = [*(start for start, _ in PARTS[1:]), "99"]
    for (start, name), end in zip(PARTS, ends, strict=True):
        inside = [pair for pair in chapters if start <= number(pair[0]) < end]
        if inside:
            lines += [f"## {name}", ""]
        for path, notebook in inside:
            lines += section(path, notebook)
    return "\n".join(lines).rstrip("\n") + "\n" + BOTTOM


def files(folder: Path = NOTEBOOKS) -> dict[Path, bytes]:
    """Every generated file of the index with its content."""
    chapters = [(path, read_notebook(path)) for path in chapter_paths(folder)]
    made = {folder / "README.md": page(chapters).encode()}
    for path, notebook in chapters:
        if picture := cover(notebook):
            made[folder / "figures" / f"{number(path)}.png"] = picture[0]
        if f"figures/{number(path)}.svg" in notebook["cells"][0]["source"]:
            made[folder / "figures" / f"{number(path)}.svg"] = way(notebook)
    return made


def write(folder: Path = NOTEBOOKS) -> None:
    """Write the page and its figures, and remove figures of chapters that are gone."""
    made = files(folder)
    for path, content in made.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            write_text(path, content.decode())
        else:
            path.write_bytes(content)
    for old in (folder / "figures").glob("*.*"):
        if old not in made:
            old.unlink()
