"""Plots `minillm bench scale`: measured time, predicted time and bound, in two panels.

Every line has its own colour (Okabe and Ito), its own marker and a label at its end, so that the
plot is readable in greyscale.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.errors import ConfigError
from minillm.lab.drawings.figure import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "osD^vP*X"
SIZE = (11.0, 5.2)  # inches
STYLE: Mapping[str, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "svg.hashsalt": "minillm",
}  # fmt: skip


def check_plot(name: str | None) -> None:
    """Reject a file name or a missing matplotlib before the benchmark starts."""
    if name is None:
        return
    if Path(name).suffix not in FORMATS:
        raise ConfigError(f"--plot is {name!r}; its name must end in {', '.join(FORMATS)}.")
    need("matplotlib.pyplot", "--plot needs matplotlib")


def draw(found: Mapping[str, Any], name: str) -> None:
    """Plot the measurements to a file."""
    plt = need("matplotlib.pyplot", "--plot needs matplotlib")
    with plt.rc_context(dict(STYLE)):
        figure, (left, right) = plt.subplots(1, 2, figsize=SIZE, sharey=True, layout="constrained")
        draw_panel(left, found["results"], "batch", "context")
        draw_panel(right, found["results"], "context", "batch")
        left.set_ylabel("time of a decode step [ms]")
        left.set_xlabel("batch (one line per context)")
        right.set_xlabel("context [tokens] (one line per batch)")
        explain_lines(figure)
        figure.suptitle(title(found))
        figure.savefig(name, dpi=110)
        plt.close(figure)


def title(found: Mapping[str, Any]) -> str:
    """The title: model, dtype, threads, machine, and accuracy of the predictions."""
    return (
        f"{found['model'].removeprefix('preset:')}, {found['dtype']}, {found['threads']} threads "
        f"of {found['machine']}: {found['explained']} of {len(found['results'])} steps within "
        f"{found['tolerance']:.0%}"
    )


def draw_panel(ax: "Axes", results: Sequence[Mapping[str, Any]], over: str, each: str) -> None:
    """One line per value of `each`, over the values of `over`, and the bounds of the outer lines;
    the other bounds would overlap with lines."""
    values = sorted({one[each] for one in results})
    for number, value in enumerate(values):
        rows = sorted((one for one in results if one[each] == value), key=lambda one: one[over])
        colour = COLOURS[number % len(COLOURS)]
        x = [one[over] for one in rows]
        measured = [1e3 * one["step_seconds"]["median"] for one in rows]
        predicted = [1e3 * one["predicted_seconds"] for one in rows]
        bound = [1e3 * one["bound_seconds"] for one in rows]
        if value in (values[0], values[-1]):
            ax.plot(x, bound, "--", color=colour, linewidth=1.0)
        ax.plot(x, predicted, "-", color=colour, linewidth=1.1)
        marker = MARKERS[number % len(MARKERS)]
        ax.plot(x, measured, marker, color=colour, markersize=5, markerfacecolor="white")
        prefix = "B=" if each == "batch" else "ctx "
        ax.annotate(f" {prefix}{value}", (x[-1], predicted[-1]), color=colour, va="center",
                    xytext=(4, 0), textcoords="offset points")  # fmt: skip
    finish_axes(ax, sorted({one[over] for one in results}))


def finish_axes(ax: "Axes", values: Sequence[int]) -> None:
    """Logarithmic axes, with the measured sizes as ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(values, [f"{value}" for value in values])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    ax.grid(alpha=0.25, linewidth=0.5)


def explain_lines(figure: Any) -> None:
    """Add the legend: measured, predicted, bound."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color="#444444", marker="o", markerfacecolor="white", linestyle="",
               label="measured (median)"),
        Line2D([], [], color="#444444", linestyle="-",
               label="predicted: from counts and separately measured rates"),
        Line2D([], [], color="#444444", linestyle="--", linewidth=1.0,
               label="bound of the outer lines: all bytes at the memory bandwidth"),
    ]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
