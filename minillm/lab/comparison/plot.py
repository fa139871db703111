"""Plots a comparison: quality against bytes, and speed against bytes.

Each method has its own marker and colour (Okabe and Ito) and every point a label, so that the plot
is readable in greyscale. Vertical bars are standard errors, or the spread over calibration samples
if it is larger.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.lab.benchmarks.plotting import COLOURS, MARKERS, STYLE
from minillm.lab.comparison.table import average
from minillm.lab.drawings.figure import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Found = Mapping[str, Any]
SIZE, LARGE, MANY = (5.8, 4.8), (10.0, 7.5), 15  # inches of a panel, of many models
LEAST_KL = 1e-5  # a logarithmic axis has no zero


def draw(result: Found, name: str | Path) -> None:
    """Plot a comparison to a file."""
    plt = need("matplotlib.pyplot", "--plot needs matplotlib")
    rows = result["results"]
    kinds = [kind for kind, wanted in (("quality", "quality"), ("speed", "speed"))
             if wanted in rows[0]]  # fmt: skip
    width, height = LARGE if len(rows) > MANY else SIZE
    with plt.rc_context(dict(STYLE)):
        figure, axes = plt.subplots(
            1, len(kinds), figsize=(width * len(kinds) + 1, height), layout="constrained",
            squeeze=False,
        )  # fmt: skip
        for ax, kind in zip(axes[0], kinds, strict=True):
            (quality_panel if kind == "quality" else speed_panel)(ax, rows)
            ax.set_xlabel("bytes of the weights on disk [MB]")
            ax.grid(alpha=0.25, linewidth=0.5)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
        figure.suptitle(str(result["model"]))
        figure.savefig(name, dpi=110)
        plt.close(figure)


def method_of(row: Found) -> str:
    """The method of a row without its settings; a file has its own name."""
    return Path(str(row["name"]).partition(":")[0]).name


def by_method(rows: Sequence[Found]) -> dict[str, list[Found]]:
    """The rows of each method, by size."""
    found: dict[str, list[Found]] = {}
    for row in sorted(rows, key=lambda row: row["disk"]["total"]):
        found.setdefault(method_of(row), []).append(row)
    return found


def quality_panel(ax: "Axes", rows: Sequence[Found]) -> None:
    """KL against bytes, both for all quantised models."""
    ax.set_yscale("log")
    ax.set_ylabel("KL to the 16-bit model [nats per token]")
    for number, (method, mine) in enumerate(by_method(rows[1:]).items()):
        y = [max(average(row, "kl"), LEAST_KL) for row in mine]
        low, high = zip(*(reach(row) for row in mine), strict=True)
        bars = ([max(0.0, v - a) for v, a in zip(y, low, strict=True)],
                [max(0.0, b - v) for v, b in zip(y, high, strict=True)])  # fmt: skip
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        x = [row["disk"]["total"] / 1e6 for row in mine]
        ax.errorbar(x, y, bars, fmt=marker, color=colour, markerfacecolor="white", markersize=5,
                    linewidth=1, label=method)  # fmt: skip
        for row, left, height in zip(mine, x, y, strict=True):
            note(ax, row, left, height, number)


def reach(row: Found) -> tuple[float, float]:
    """The ends of a bar: a standard error each way, or all calibration samples."""
    values = [sample["kl"]["value"] for sample in row["quality"]]
    error, middle = max(sample["kl"]["error"] for sample in row["quality"]), average(row, "kl")
    return min([*values, middle - error]), max([*values, middle + error])


def speed_panel(ax: "Axes", rows: Sequence[Found]) -> None:
    """Tokens/s at batch 1 against bytes."""
    ax.set_ylabel("tokens per second, batch 1")
    for number, (method, mine) in enumerate(by_method(rows).items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        x = [row["disk"]["total"] / 1e6 for row in mine]
        y = [row["speed"]["by_batch"][0]["tokens_per_second"] for row in mine]
        ax.plot(x, y, marker, color=colour, markerfacecolor="white", markersize=5, label=method)
        for row, left, height in zip(mine, x, y, strict=True):
            note(ax, row, left, height, number)
    ax.set_ylim(bottom=0)


def note(ax: "Axes", row: Found, x: float, y: float, number: int) -> None:
    """Write the settings of a row beside its point, on the left for every second method."""
    settings = str(row["name"]).partition(":")[2] or method_of(row)
    place = {"xytext": (4, 2)} if number % 2 == 0 else {"xytext": (-5, -7), "ha": "right"}
    ax.annotate(settings, (x, y), fontsize=6, textcoords="offset points", **place)
