#!/usr/bin/env python3
"""A deck of slides for each chapter, made from the tags and outputs of its cells: dist/slides/.

A deck is one HTML file that needs nothing else. Arrow keys and clicks turn it, print it for paper.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from nbconvert.filters import markdown2html

import chapters
from chapters import NOTEBOOKS, Notebook, read_notebook, stdout, tags
from index import title, way
from minillm_exercises.widgets import CSS

KINDS = ("predict", "result", "claim", "losses", "fix")
CODE_LINES = 18  # of a fix that a room can read
KEY = re.compile(r"\b(?:predict|compare)\(\s*\"([\w.]+)\"")
QUESTION = re.compile(r"^(?:\S.*\n)+(?= +a\))", re.MULTILINE)
PAGE = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body {{ margin: 0; font: 26px/1.4 system-ui, sans-serif; }} .anchor-link {{ display: none; }}
section {{ display: none; box-sizing: border-box; min-height: 100vh; padding: 4vh 6vw; }}
section.on {{ display: flex; flex-direction: column; height: 100vh; overflow: auto; }}
section > * {{ flex-shrink: 0; margin: 0.3em 0; }} .plot em, .result em {{ font-size: 0.75em; }}
img, svg {{ flex: 0 1 70vh; min-height: 45vh; width: 100%; object-fit: contain;
  object-position: left; background: #fff; }} pre {{ font-size: 0.8em; white-space: pre-wrap; }}
.predict pre, .result pre {{ font: 1.2em/1.6 system-ui, sans-serif; }}
td, th {{ padding: 0 0.6em; text-align: left; }} table, .losses, .claim {{ font-size: 0.8em; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111; color: #eee; }} }}
@media print {{ section {{ display: block; break-after: page; }} }} {style}</style>{body}<script>
const pages = [...document.querySelectorAll('section')];
const turn = step => {{
  const next = (parseInt(location.hash.slice(1)) || 1) - 1 + step;
  const at = Math.max(0, Math.min(pages.length - 1, next));
  pages.forEach((page, n) => page.classList.toggle('on', n === at));
  history.replaceState(null, '', '#' + (at + 1));
}};
const STEPS = {{ ArrowRight: 1, PageDown: 1, ' ': 1, ArrowLeft: -1, PageUp: -1 }};
addEventListener('keydown', e => e.key in STEPS && (e.preventDefault(), turn(STEPS[e.key])));
addEventListener('click', e => e.target.closest('a') || turn(e.clientX < innerWidth / 4 ? -1 : 1));
turn(0);
</script></html>
"""


def slides(notebook: Notebook) -> Iterator[tuple[str, str]]:
    """Kind and HTML of each slide, in order. A prediction's has no heading, which may tell."""
    head, question = title(notebook), notebook["metadata"]["minillm"]["question"]
    yield "title", f"<h1>{escape(head)}</h1><p>{escape(question)}</p>{way(notebook).decode()}"
    heading, asked = "", {}
    for cell in notebook["cells"][1:]:
        kind = next((tag for tag in KINDS if tag in tags(cell)), "plot")
        source, parts = cell["source"], []
        if cell["cell_type"] == "markdown":
            found = re.search(r"^## .+$", source, re.MULTILINE)
            heading = markdown2html(found[0]) if found else heading
            parts += [markdown2html(source)] if kind != "plot" else []
        elif "task(" not in source and not {"quiz", "facts"} & set(tags(cell)):
            if kind == "fix" and len(source.splitlines()) <= CODE_LINES:
                parts.append(f"<pre>{escape(source)}</pre>")
            if kind in ("predict", "result"):
                keys = KEY.findall(source)
                asked |= zip(keys, QUESTION.findall(stdout(cell["outputs"])), strict=False)
                parts += [f"<em>{escape(asked[key])}</em>" for key in keys if kind == "result"]
                said = re.sub(r"(?m)^measured: .*\n", "", stdout(cell["outputs"]))
                said = QUESTION.sub(lambda found: " ".join(found[0].split()) + "\n", said)
                parts.append(f"<pre>{escape(said)}</pre>")
            for data in (output.get("data", {}) for output in cell["outputs"]):
                if png := data.get("image/png"):
                    parts.append(f'<img alt="" src="data:image/png;base64,{png.strip()}">')
                elif (text := data.get("text/markdown")) and "<details" not in text:
                    parts.append(markdown2html(text))
            parts = [heading, *parts] if parts and kind != "predict" else parts
        if parts:
            yield kind, "".join(parts)


def results_first(pages: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The same slides, each result before the plots in front of it, which would tell it."""
    plots: list[tuple[str, str]] = []
    for slide in pages:
        if slide[0] == "plot":
            plots.append(slide)
            continue
        yield from [slide, *plots] if slide[0] == "result" else [*plots, slide]
        plots = []
    yield from plots


def deck(path: Path) -> str:
    """The deck of one chapter; its last slide is what the teaching page wants to be taken home."""
    notebook = read_notebook(path)
    made = list(results_first(slides(notebook)))
    text = (path.parent / "teaching" / f"{chapters.number(path)}.md").read_text("utf-8")
    if home := re.search(r"\*\*To take home\.\*\* (.+?)\n\n", text, re.DOTALL):
        made.append(("home", f"<h2>To take home</h2>{markdown2html(home[1])}"))
    body = "".join(f'<section class="{k} celltag_{k}">{html}</section>' for k, html in made)
    return PAGE.format(title=escape(title(notebook)), style=CSS.read_text("utf-8"), body=body)


def main(out: Path = NOTEBOOKS.parent / "dist" / "slides") -> int:
    """Write the decks of the chapters that the command line names ("06"), or of all."""
    for path in chapters.chapter_paths(wanted=tuple(sys.argv[1:])):
        chapters.write_text(out / f"{path.stem}.html", deck(path))
        sys.stdout.write(f"{out / path.stem}.html\n")
    return 0


if __name__ == "__main__":
    sys.exit(chapters.script_errors(main))
