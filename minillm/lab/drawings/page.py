"""A trace as a self-contained HTML page, without network, server or libraries.

The page is a template with style, scripts and data inlined. A trace has untrusted text, such as
request ids. So the data is escaped and cannot end its element, the scripts show it only as text,
and a content security policy with the hashes of this style and this script blocks everything else.
"""

import html
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from minillm.errors import TraceFileError
from minillm.serving.playground_page import digest, read

MARKER = '<meta name="generator" content="minillm trace view">'
SCRIPTS = ("model", "words", "raster", "scale", "header", "curves", "rows", "blocks", "ranks",
           "details", "app", "controls", "main")  # fmt: skip


def page(data: dict[str, Any], title: str = "trace", reload: float | None = None) -> str:
    """The HTML page of `data`, a timeline of `timeline.timeline`. A browser loads it again after
    `reload` seconds."""
    folder = resources.files("minillm.lab.drawings")
    style = folder.joinpath("page.css").read_text("utf-8")
    script = scripts()
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    values = {
        "policy": policy,
        "title": html.escape(title.encode("utf-8", "replace").decode()),
        "reload": "" if reload is None else f'<meta http-equiv="refresh" content="{reload:g}">',
        "style": style,
        "script": script,
        "data": embedded(data),
    }
    template = folder.joinpath("page.html").read_text("utf-8")
    # In one pass, so that placeholders in inserted text are not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: values[place[1]], template)


def scripts(names: Sequence[str] = SCRIPTS) -> str:
    """These scripts of the page, after the one that it shares with the playground."""
    folder = resources.files("minillm.lab.drawings")
    parts = [folder.joinpath(f"page_{name}.js").read_text("utf-8") for name in names]
    return "\n".join([read("numbers.js"), *parts])


def embedded(data: Any) -> str:
    """JSON that cannot end a script element. It is ASCII, so that lone surrogates, which UTF-8
    cannot encode, are kept."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_page(
    data: dict[str, Any], path: str | Path, title: str = "trace", reload: float | None = None
) -> None:
    """Write the page to a file; TraceFileError if the file exists and is not a trace page.

    The file is replaced by a whole one: a browser that loads it again never finds a part, which
    would lack the request to load it once more.
    """
    path = Path(path)
    part = path.with_name(f"{path.name}.part")
    try:
        if path.exists() and not is_page(path):
            raise TraceFileError(
                f"{str(path)!r} exists and is not a trace page; give another name, or delete it."
            )
        part.write_text(page(data, title, reload), "utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise TraceFileError(f"{str(path)!r} cannot be written: {error.strerror}.") from error


def is_page(path: Path) -> bool:
    """Whether a file was written by `write_page` and may be overwritten."""
    with path.open("rb") as file:
        return MARKER.encode() in file.read(2000)
