"""The picture of chapter 05 that shows its mechanism: rows through one matrix."""

from typing import TYPE_CHECKING, Any

from minillm_exercises.plots import COLOURS, box, figure, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HATCHES = ("", "///", "...")
CACHES = (2.2, 1.3, 2.9)  # lengths of the drawn caches


def draw_rows() -> None:
    """Draw two steps of three requests: one request at a time, and all together."""
    fig, (left, right) = figure("-", "-", cols=2, size=(10, 4.6))
    for ax in (left, right):
        ax.set_axis_off()
        ax.set(xlim=(0, 11), ylim=(-0.6, 7.4))
    left.set_title("one request at a time: three readings of the weights", fontsize=10)
    right.set_title("together: one reading, three rows", fontsize=10)
    for row, name in enumerate("ABC"):
        y = 5.6 - 2.5 * row
        _row(left, y, row, name)
        _box(left, 3.0, y - 0.65, 2.2, 1.6, "weights", facecolor="#dddddd")
        _arrow(left, 2.2, 2.9, y + 0.15)
        _arrow(left, 5.3, 6.0, y + 0.15)
        _cache(left, y, row, name)
        y = 4.0 - 0.8 * row
        _row(right, y, row, name)
        _arrow(right, 2.2, 2.9, y + 0.15)
        _arrow(right, 5.3, 6.0, y + 0.15)
        _cache(right, y, row, name)
    _box(right, 3.0, 1.85, 2.2, 3.0, "weights", facecolor="#dddddd")
    for ax in (left, right):
        for x, text in ((1.35, "token"), (4.1, "products"), (7.6, "attention over one cache each")):
            ax.text(x, 7.0, text, ha="center", va="center", fontsize=9, style="italic")
    show(
        fig,
        "Three requests A, B and C in one decode step: together their tokens are three rows that "
        "share one reading of the weights, and each row still reads the cache of its own text.",
    )


def _row(ax: "Axes", y: float, number: int, name: str) -> None:
    _box(ax, 0.5, y - 0.1, 1.6, 0.5, name, facecolor=COLOURS[number], hatch=HATCHES[number])


def _cache(ax: "Axes", y: float, number: int, name: str) -> None:
    style = {"facecolor": "white", "hatch": HATCHES[number], "edgecolor": COLOURS[number]}
    _box(ax, 6.2, y - 0.1, CACHES[number], 0.5, "", **style)
    ax.text(6.2 + CACHES[number] + 0.15, y + 0.15, f"cache of {name}", va="center", fontsize=9)


def _box(
    ax: "Axes", x: float, y: float, width: float, height: float, text: str, **style: Any
) -> None:
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1} if "hatch" in style else None
    look = {"edgecolor": "black"} | style
    box(ax, x, y, width, height, look, text, fontsize=9, bbox=background)


def _arrow(ax: "Axes", start: float, end: float, y: float) -> None:
    ax.annotate("", (end, y), (start, y), arrowprops={"arrowstyle": "->"})
