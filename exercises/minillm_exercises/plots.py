"""The course's plots: one look, readable in colour, in print and without colour.

Colours are Okabe and Ito's (2008), which people with any common colour vision can tell apart, in
an order whose greys differ too; every series also has its own marker and dash, and the limit that
physics sets is always the same dashed black line with its name on it.
"""

import inspect
import io
import os
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minillm_exercises.errors import ExerciseError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#56B4E9", "#009E73", "#CC79A7", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)))
STYLE: dict[Any, Any] = {
    "figure.dpi": 100,
    "font.size": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
}


def series(index: int) -> dict[str, Any]:
    """Keyword arguments of ``ax.plot`` for the series of that number: colour, marker and dash."""
    place = index % len(COLOURS)
    return {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": DASHES[place]}


def bars(index: int) -> dict[str, Any]:
    """Keyword arguments of ``ax.bar`` for the series of that number: colour and hatching."""
    hatch = ("", "//", "..", "xx", "\\\\", "++")[index % len(COLOURS)]
    return {"color": COLOURS[index % len(COLOURS)], "hatch": hatch, "edgecolor": "white"}


def figure(
    x: str, y: str, rows: int = 1, cols: int = 1, size: tuple[float, float] | None = None
) -> "tuple[Figure, Any]":
    """A figure and its axes (one, or an array of them), labelled ``x`` and ``y`` with their units,
    for instance ``figure("prompt tokens", "time to first token (ms)")``. `size` is in inches.

    Raises:
        ExerciseError: a label is empty.
    """
    from matplotlib import pyplot as plt  # half a second: only a chapter that draws pays it

    if not x.strip() or not y.strip():
        raise ExerciseError("figure() needs a label with its unit for both axes.")
    plt.rcParams.update(STYLE)
    fig, axes = plt.subplots(
        rows, cols, figsize=size or (3.2 * cols + 3, 3.2 * rows + 0.4), layout="constrained"
    )
    for ax in fig.axes:
        ax.set_xlabel(x)
        ax.set_ylabel(y)
    return fig, axes


def box(
    ax: "Axes", x: float, y: float, width: float, height: float, look: Mapping[str, Any],
    text: str = "", **words: Any,
) -> None:  # fmt: skip
    """Draw a rectangle from the corner ``x``, ``y``, with a text in its middle; `words` are options
    of the text."""
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), width, height, **look))
    if text:
        ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", **words)


def note(ax: "Axes", text: str, point: Any, offset: tuple[float, float], **words: Any) -> None:
    """Write a text so many points beside a point of the data; `words` are options of the text."""
    look: dict[str, Any] = {"fontsize": 9} | words
    ax.annotate(text, point, xytext=offset, textcoords="offset points", **look)


def bound(ax: "Axes", x: Any, y: Any, label: str, side: str = "below", at: float = 1.0) -> None:
    """Draw a bound through the points ``x``, ``y``: dashed, black, named on the line itself.

    The name stands on the `side` ("below" or "above") that the bound forbids, `at` a share of the
    points from the left.
    """
    ax.plot(x, y, color="black", linestyle="--", linewidth=1.2, zorder=1.5)
    place = round(at * (len(x) - 1))
    horizontal = "left" if at < 0.25 else "right" if at > 0.75 else "center"
    vertical, up = ("bottom", 4) if side == "above" else ("top", -4)
    note(ax, label, (x[place], y[place]), (0, up), ha=horizontal, va=vertical)


def show(fig: "Figure", caption: str) -> None:
    """Show a figure with `caption` below it, which is also the picture's alternative text: one
    sentence that says how to read it and what it shows.

    Raises:
        ExerciseError: the caption is empty or no sentence.
    """
    if len(caption.split()) < 5 or not caption.rstrip().endswith("."):
        raise ExerciseError(f"The caption {caption!r} is no sentence; say what the figure shows.")
    from IPython.display import Markdown, display
    from matplotlib import pyplot as plt

    picture = _png(fig)
    plt.close(fig)
    display(
        {"image/png": picture, "text/plain": f"[figure] {caption}"},
        raw=True,
        metadata={"image/png": {"alt": caption}},
    )
    display(Markdown(f"*{caption}*"))


def _png(fig: "Figure") -> bytes:
    """The figure as a PNG of 256 colours, which has a third of the bytes of one with all. With
    MINILLM_QUICK it is laid out, and there is no picture, which would take as long."""
    from PIL import Image

    if os.environ.get("MINILLM_QUICK"):
        fig.draw_without_rendering()
        return b""

    drawn, small = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", dpi=100)
    with Image.open(drawn) as picture:
        fewer = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    fewer.save(small, format="png", optimize=True)
    return small.getvalue()


def listing(title: str, *parts: Any) -> None:
    """Show the source of functions or classes folded behind `title`, for a reader who wants it.

    Raises:
        ExerciseError: nothing to show.
    """
    from IPython.display import Markdown, display

    display(Markdown(listed(title, *parts)))


def listed(title: str, *parts: Any) -> str:
    """What `listing` shows, as Markdown."""
    if not parts:
        raise ExerciseError("listing() needs a function or a class to show.")
    code = "\n\n".join(textwrap.dedent(inspect.getsource(part)).rstrip() for part in parts)
    return f"<details><summary>{title}</summary>\n\n```python\n{code}\n```\n\n</details>"
