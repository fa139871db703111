"""The throughput-latency figure of a sweep, as PNG, SVG or PDF.

Lines differ by marker and dashes as well as by colour (Okabe and Ito). Bands are the least and the
most over the repeats. The output throughput is that of the time in which load was offered.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minillm.lab.benchmarks.serving.sweep import by_load
from minillm.lab.drawings.figure import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (11.0, 6.6)  # inches
STYLE: Mapping[str, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "svg.hashsalt": "minillm",
}  # fmt: skip
BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"
# Title, scale and lines of each panel; a line is a figure, its label, colour and style.
Line = tuple[str, str, str, str]
PANELS: Sequence[tuple[str, float, tuple[Line, ...]]] = (
    ("TTFT [ms]", 1e3, (("ttft_p99", "p99", ORANGE, "s--"), ("ttft_p50", "p50", BLUE, "o-"))),
    ("TPOT [ms]", 1e3, (("tpot_p99", "p99", ORANGE, "s--"), ("tpot_p50", "p50", BLUE, "o-"))),
    ("output tokens/s", 1, (("output_throughput", "measured", BLUE, "o-"),)),
    ("requests/s", 1, (("request_throughput", "succeeded", ORANGE, "s--"),
                       ("goodput", "goodput (met the SLO)", GREEN, "D-"))),
    ("share of all requests sent [%]", 100, (("attainment", "attainment", GREEN, "D-"),
                                             ("rejected", "rejected (429, 503)", ORANGE, "x--"),
                                             ("failed", "failed", BLACK, "v:"))),
)  # fmt: skip
WIDE = 20.0  # a wider range of loads gets a logarithmic axis
CAPTION_WIDTH = 52  # characters


def draw(result: Mapping[str, Any], name: str) -> None:
    """Plot the sweep to a file."""
    plt = need("matplotlib.pyplot", "--plot needs matplotlib")
    with plt.rc_context(dict(STYLE)):
        figure = figure_of(result)
        figure.savefig(name, dpi=130)
        plt.close(figure)


def figure_of(result: Mapping[str, Any]) -> Any:
    """The sweep as a matplotlib figure: five panels and the caption."""
    plt = need("matplotlib.pyplot", "--plot needs matplotlib")
    points = by_load(result["points"])
    figure, axes = plt.subplots(2, 3, figsize=SIZE, layout="constrained")
    for ax, (title, scale, lines) in zip(axes.flat, PANELS, strict=False):
        ax.set_title(title, loc="left")
        for one in lines:
            line(ax, points, *one, scale)
    for ax, name in zip(axes.flat, ("ttft", "tpot"), strict=False):
        if ax.lines:
            ax.set_yscale("log")
            plain_ticks(ax)
        if name in result["slo"]:
            bound(ax, 1e3 * result["slo"][name], "objective")
    if any(one["attainment"] is not None for one in points):
        bound(axes[1][1], 100 * result["target_attainment"], "target")
    axes[1][1].set_ylim(-4, 104)
    for ax, name, label in ((axes[0][2], "asked", "asked for (arrivals x output length)"),
                            (axes[1][0], "load", "offered")):  # fmt: skip
        ax.set_ylim(bottom=0)
        if not result["plan"]["closed"] and points:
            ax.set_ylim(0, 1.35 * max(max(each.get_ydata()) for each in ax.lines) or None)
            y = [one[name] if name == "load" else one[name]["median"] for one in points]
            ax.plot([one["load"] for one in points], y, ":", color=BLACK, linewidth=1.0,
                    label=label)  # fmt: skip
    for ax in axes.flat[:5]:
        finish(ax, points, result)
    caption(axes[1][2], result)
    return figure


def line(
    ax: "Axes", points: Sequence[Mapping[str, Any]], name: str, label: str, colour: str,
    style: str, scale: float,
) -> None:  # fmt: skip
    """One line with its band; nothing if no point has the figure."""
    known = [one for one in points if one[name] is not None]
    if known:
        x = [one["load"] for one in known]
        rows = {which: [scale * one[name][which] for one in known] for which in known[0][name]}
        ax.plot(x, rows["median"], style, color=colour, label=label, markersize=5, linewidth=1.4,
                markerfacecolor="white")  # fmt: skip
        ax.fill_between(x, rows["least"], rows["most"], color=colour, alpha=0.18, linewidth=0)


def bound(ax: "Axes", value: float, label: str) -> None:
    """A dotted line at an objective or target."""
    ax.axhline(value, color=BLACK, linewidth=0.9, linestyle=(0, (1, 2)), label=label)


def plain_ticks(ax: "Axes") -> None:
    """Numbers without exponents on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def finish(ax: "Axes", points: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> None:
    """The axis of loads, the knee, and the legend."""
    from matplotlib.ticker import NullLocator

    loads = [one["load"] for one in points]
    several = result["plan"]["workload"].startswith("chat")
    what = "conversations" if several else "requests"
    ax.set_xlabel("concurrency" if result["plan"]["closed"] else f"offered load [{what}/s]")
    if loads and max(loads) > WIDE * min(loads):
        ax.set_xscale("log")
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xticks(loads, [f"{load:g}" for load in loads])
    if result["knee"] is not None:
        ax.axvline(result["knee"]["load"], color="#666666", linewidth=1.0, linestyle="-.",
                   label="knee")  # fmt: skip
    ax.grid(alpha=0.25, linewidth=0.5)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8, framealpha=0.85, edgecolor="none")


def caption(ax: "Axes", result: Mapping[str, Any]) -> None:
    """What was measured, as text."""
    from textwrap import fill

    ax.axis("off")
    text = "\n\n".join(fill(each, CAPTION_WIDTH) for each in caption_lines(result))
    ax.text(0.0, 1.0, text, va="top", fontsize=8.5, transform=ax.transAxes)


def caption_lines(result: Mapping[str, Any]) -> list[str]:
    """Model, hardware, dtype, distributions, prefix cache, and what the lines mean."""
    plan, target = result["plan"], result["target"]
    prompts = sum(run["summary"]["prompt_tokens"] for run in result["runs"])
    cached = sum(run["summary"]["cached_tokens"] for run in result["runs"])
    warmup = f" (the first {plan['warmup']} are warm-up)" if plan["warmup"] else ""
    lines = [
        f"{target['model']}, {result['dtype']}, {result['hardware']}",
        f"{plan['process']}; {plan['workload'].replace(',', ', ')}",
        f"{plan['requests']}{warmup}, seed {plan['seed']}, {plan['repeats']} repeats "
        "(lines: median, bands: least and most)",
        "Latencies count from the time a request was due; TTFT and TPOT as vLLM defines them.",
    ]
    if prompts:
        lines.append(f"{cached / prompts:.0%} of the prompt tokens came from the prefix cache.")
    if result["knee"] is not None:
        lines.append(f"Knee: {result['knee']['load']:g}, {result['knee']['why']}.")
    return lines
