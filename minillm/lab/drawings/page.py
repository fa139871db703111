"""A trace as one HTML page that needs nothing else: no network, no server, no library.

The page is a template with the style, the scripts and the data inlined. A trace holds text of
strangers (a request's id is whatever its user sent), so the data is escaped such that it cannot end
its element, the scripts show it as text only, and a content security policy, with the hashes of
exactly this style and this script, lets nothing else run or load.
"""

import base64
import hashlib
import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from minillm.errors import TraceFileError

MARKER = '<meta name="generator" content="minillm trace view">'
SCRIPTS = ("model", "words", "raster", "scale", "header", "curves", "rows", "blocks", "ranks",
           "details", "app", "controls", "main")  # fmt: skip


def page(data: dict[str, Any], title: str = "trace") -> str:
    """The HTML of the drawing of `data`, which `timeline.timeline` makes."""
    folder = resources.files("minillm.lab.drawings")
    style = folder.joinpath("page.css").read_text("utf-8")
    parts = [folder.joinpath(f"page_{name}.js").read_text("utf-8") for name in SCRIPTS]
    script = "\n".join(parts)
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    values = {
        "policy": policy,
        "title": html.escape(title.encode("utf-8", "replace").decode()),
        "style": style,
        "script": script,
        "data": embedded(data),
    }
    template = folder.joinpath("page.html").read_text("utf-8")
    # One pass: what is put in is not looked through for further places.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: values[place[1]], template)


def digest(text: str) -> str:
    """How a content security policy names one inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embedded(data: Any) -> str:
    """JSON that cannot end a script element, whatever texts are in it. Only ASCII, so that half a
    surrogate pair, which no file can hold, survives too."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_page(data: dict[str, Any], path: str | Path, title: str = "trace") -> None:
    """Write the page into a file, unless that holds something else."""
    path = Path(path)
    try:
        if path.exists() and not is_page(path):
            raise TraceFileError(
                f"{str(path)!r} exists and is no trace page; give another name, or delete it."
            )
        path.write_text(page(data, title), "utf-8")
    except OSError as error:
        raise TraceFileError(f"{str(path)!r} cannot be written: {error.strerror}.") from error


def is_page(path: Path) -> bool:
    """Whether a file was written by `write_page`, and may be overwritten."""
    with path.open("rb") as file:
        return MARKER.encode() in file.read(2000)
