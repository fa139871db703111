"""The throughput-latency figure of a sweep, as PNG, SVG or PDF.

Lines differ by marker and dashes as well as by colour (Okabe and Ito). Bands are the least and the
most over the repeats. The output throughput is that of the time in which load was offered.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minillm.lab.drawings.figure import need

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (11.0, 6.6)  # inches
STYLE: Mapping[str, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "svg.hashsalt": "minillm",
}  # fmt: skip
BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"
WIDE = 20.0  # a wider range of loads gets a logarithmic axis
CAPTION_WIDTH = 52  # characters


def draw(found: Mapping[str, Any], name: str) -> None:
    """Plot the sweep to a file."""
    plt = need("matplotlib.pyplot", "--plot needs matplotlib")
    with plt.rc_context(dict(STYLE)):
        figure = figure_of(found)
        figure.savefig(name, dpi=130)
        plt.close(figure)


def figure_of(found: Mapping[str, Any]) -> Any:
    """The sweep as a matplotlib figure: five panels and the caption."""
    plt = need("matplotlib.pyplot", "--plot needs matplotlib")
    points = sorted(
        (one for one in found["points"] if one["load"] is not None), key=lambda one: one["load"]
    )
    figure, axes = plt.subplots(2, 3, figsize=SIZE, layout="constrained")
    latency_panel(axes[0][0], points, "ttft", "TTFT [ms]", found["slo"])
    latency_panel(axes[0][1], points, "tpot", "TPOT [ms]", found["slo"])
    throughput_panel(axes[0][2], points, found["plan"]["closed"])
    goodput_panel(axes[1][0], points, found["plan"]["closed"])
    shares_panel(axes[1][1], points, found["target_attainment"])
    for ax in axes.flat[:5]:
        finish(ax, points, found)
    caption(axes[1][2], found)
    return figure


def line(
    ax: "Axes", points: Sequence[Mapping[str, Any]], name: str, label: str, colour: str,
    style: str, scale: float = 1.0,
) -> bool:  # fmt: skip
    """One line with its band; False if no point has the figure."""
    known = [one for one in points if one[name] is not None]
    if not known:
        return False
    x = [one["load"] for one in known]
    rows = {which: [scale * one[name][which] for one in known] for which in known[0][name]}
    ax.plot(x, rows["median"], style, color=colour, label=label, markersize=5, linewidth=1.4,
            markerfacecolor="white")  # fmt: skip
    ax.fill_between(x, rows["least"], rows["most"], color=colour, alpha=0.18, linewidth=0)
    return True


def latency_panel(
    ax: "Axes", points: Sequence[Mapping[str, Any]], name: str, title: str,
    slo: Mapping[str, float],
) -> None:  # fmt: skip
    """Median and p99 of a latency, and its objective."""
    ax.set_title(title, loc="left")
    drawn = line(ax, points, f"{name}_p99", "p99", ORANGE, "s--", 1e3)
    if line(ax, points, f"{name}_p50", "p50", BLUE, "o-", 1e3) or drawn:
        ax.set_yscale("log")
        plain_ticks(ax)
    if name in slo:
        ax.axhline(1e3 * slo[name], color=BLACK, linewidth=0.9, linestyle=(0, (1, 2)),
                   label="objective")  # fmt: skip


def plain_ticks(ax: "Axes") -> None:
    """Numbers without exponents on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def throughput_panel(ax: "Axes", points: Sequence[Mapping[str, Any]], closed: bool) -> None:
    """Output tokens per second, and what the load asks for."""
    ax.set_title("output tokens/s", loc="left")
    line(ax, points, "output_throughput", "measured", BLUE, "o-")
    if not closed and points:
        top = max(one["output_throughput"]["most"] for one in points)
        asked = [one["asked"]["median"] for one in points]
        ax.plot([one["load"] for one in points], asked, ":", color=BLACK, linewidth=1.0,
                label="asked for (arrivals x output length)")  # fmt: skip
        ax.set_ylim(0, 1.35 * top or None)
    else:
        ax.set_ylim(bottom=0)


def goodput_panel(ax: "Axes", points: Sequence[Mapping[str, Any]], closed: bool) -> None:
    """Requests per second that succeeded, and that met the SLO."""
    ax.set_title("requests/s", loc="left")
    line(ax, points, "request_throughput", "succeeded", ORANGE, "s--")
    line(ax, points, "goodput", "goodput (met the SLO)", GREEN, "D-")
    if not closed and points:
        loads = [one["load"] for one in points]
        ax.plot(loads, loads, ":", color=BLACK, linewidth=1.0, label="offered")
        ax.set_ylim(0, 1.35 * max(one["request_throughput"]["most"] for one in points) or None)
    else:
        ax.set_ylim(bottom=0)


def shares_panel(ax: "Axes", points: Sequence[Mapping[str, Any]], target: float) -> None:
    """Attainment, rejections and failures, as shares of all requests sent."""
    ax.set_title("share of all requests sent [%]", loc="left")
    if line(ax, points, "attainment", "attainment", GREEN, "D-", 100):
        ax.axhline(100 * target, color=BLACK, linewidth=0.9, linestyle=(0, (1, 2)), label="target")
    line(ax, points, "rejected", "rejected (429, 503)", ORANGE, "x--", 100)
    line(ax, points, "failed", "failed", BLACK, "v:", 100)
    ax.set_ylim(-4, 104)


def finish(ax: "Axes", points: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> None:
    """The axis of loads, the knee, and the legend."""
    from matplotlib.ticker import NullLocator

    loads = [one["load"] for one in points]
    several = found["plan"]["workload"].startswith("chat")
    what = "conversations" if several else "requests"
    ax.set_xlabel("concurrency" if found["plan"]["closed"] else f"offered load [{what}/s]")
    if loads and max(loads) > WIDE * min(loads):
        ax.set_xscale("log")
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xticks(loads, [f"{load:g}" for load in loads])
    if found["knee"] is not None:
        ax.axvline(found["knee"]["load"], color="#666666", linewidth=1.0, linestyle="-.",
                   label="knee")  # fmt: skip
    ax.grid(alpha=0.25, linewidth=0.5)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8, framealpha=0.85, edgecolor="none")


def caption(ax: "Axes", found: Mapping[str, Any]) -> None:
    """What was measured, as text."""
    from textwrap import fill

    ax.axis("off")
    text = "\n\n".join(fill(each, CAPTION_WIDTH) for each in caption_lines(found))
    ax.text(0.0, 1.0, text, va="top", fontsize=8.5, transform=ax.transAxes)


def caption_lines(found: Mapping[str, Any]) -> list[str]:
    """Model, hardware, dtype, distributions, prefix cache, and what the lines mean."""
    plan, target = found["plan"], found["target"]
    prompts = sum(run["summary"]["prompt_tokens"] for run in found["runs"])
    cached = sum(run["summary"]["cached_tokens"] for run in found["runs"])
    warmup = f" (the first {plan['warmup']} are warm-up)" if plan["warmup"] else ""
    lines = [
        f"{target['model']}, {found['dtype']}, {found['hardware']}",
        f"{plan['process']}; {plan['workload'].replace(',', ', ')}",
        f"{plan['requests']}{warmup}, seed {plan['seed']}, {plan['repeats']} repeats "
        "(lines: median, bands: least and most)",
        "Latencies count from the time a request was due; TTFT and TPOT as vLLM defines them.",
    ]
    if prompts:
        lines.append(f"{cached / prompts:.0%} of the prompt tokens came from the prefix cache.")
    if found["knee"] is not None:
        lines.append(f"Knee: {found['knee']['load']:g}, {found['knee']['why']}.")
    return lines
