"""A trace as a static matplotlib figure, and the page as a notebook widget.

The figure shows the same data as the page. Colours are Okabe and Ito's; every state also has its
own height and hatch, for printing in grey. Plotting libraries are imported only when needed.
"""

import html
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from minillm.errors import ConfigError, UnsupportedFeatureError, did_you_mean
from minillm.lab.drawings.figure_panels import (
    blocks_height,
    box,
    draw_blocks,
    draw_ranks,
    ranks_height,
    shown_blocks,
)
from minillm.lab.drawings.page import page
from minillm.lab.drawings.timeline import NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class State(NamedTuple):
    """The style of a kind of span."""

    colour: str
    height: float  # as a share of a row
    hatch: str


# Later states are drawn over earlier ones, so that rare states are visible.
STATES: Mapping[str, State] = {
    "w": State("#8A95A0", 0.16, ""),
    "d": State("#009E73", 0.5, ""),
    "p": State("#0072B2", 0.84, ""),
    "r": State("#D55E00", 0.84, "////"),
    "s": State("#F0E442", 0.84, "||||"),
    "o": State("#CC79A7", 0.44, "...."),
    "x": State("#E69F00", 0.44, "xxxx"),
}
IDLE = "wsox"  # adjacent spans are merged: they differ only in the reason, which is not shown
ENDS: Mapping[str, str] = {"stop": "o", "length": "s", "abort": "x", "error": "D"}
MARK_NAMES: Mapping[str, str] = {"arrival": "arrives", "length": "ended"}
CURVES: Mapping[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "queue": ("sequences", (("running", "#009E73"), ("waiting", "#D55E00"))),
    "budget": ("tokens",
               (("decode", "#009E73"), ("prefill", "#0072B2"), ("recomputed", "#D55E00"),
                ("drafted", "#56B4E9"))),
    "free": ("free blocks", (("free", "#0072B2"),)),
    "time": ("ms", (("plan", "#E69F00"), ("run", "#0072B2"), ("deliver", "#CC79A7"))),
}  # fmt: skip
STACKED = ("budget", "time")
PANELS = ("gantt", *CURVES, "ranks", "blocks")
DEFAULT_PANELS = ("gantt", "queue", "budget", "ranks", "blocks")
DRAFTS_HEIGHT = 0.8  # as a share of a row
MAX_ROWS = 150  # of the Gantt chart; more are too small to read
DRAFTS = (("accepted draft", "#003B2C", "#FFFFFF"), ("rejected draft", "#FFFFFF", "#003B2C"))
STYLE: Mapping[str, Any] = {"font.size": 9, "hatch.linewidth": 0.5, "axes.spines.top": False,
         "axes.spines.right": False, "legend.frameon": False}  # fmt: skip


def figure(
    data: dict[str, Any],
    panels: Sequence[str] = DEFAULT_PANELS,
    width: float = 10.0,
    height: float | None = None,
    rows: int = MAX_ROWS,
    title: str | None = None,
) -> "Figure":
    """A matplotlib figure of a timeline.

    Args:
        data: a timeline of `timeline.timeline`.
        panels: panels from top to bottom: "gantt", "queue", "budget", "free", "time", "ranks",
            "blocks". "ranks" is left out if there is only one rank.
        width, height: in inches; by default the height fits the rows.
        rows: maximum number of sequences in the Gantt chart, the first ones by arrival.
        title: title of the figure.

    Raises:
        ConfigError: a panel does not exist, or no panel has data.
        UnsupportedFeatureError: matplotlib is not installed.
    """
    panels = check_panels(panels, data)
    plt = need("matplotlib.pyplot", "A figure needs matplotlib")
    heights = dict.fromkeys(CURVES, 1.1) | {
        "gantt": gantt_height(min(len(data["sequences"]), rows)),
        "ranks": ranks_height(len(data["ranks"])),
        "blocks": blocks_height(len(shown_blocks(data["blocks"]))),
    }
    draw: dict[str, Callable[[Axes, dict[str, Any]], None]] = {
        "gantt": partial(draw_gantt, rows=rows), "ranks": draw_ranks, "blocks": draw_blocks
    }  # fmt: skip
    with plt.rc_context(dict(STYLE)):
        inches = [heights[name] for name in panels]
        size = (width, height or sum(inches) + 0.7 + 0.3 * bool(title))
        fig, axes = plt.subplots(
            len(panels), 1, figsize=size, sharex=True, squeeze=False, layout="constrained",
            gridspec_kw={"height_ratios": inches},
        )  # fmt: skip
        plt.close(fig)  # else pyplot would show the figure that a notebook cell returns again
        for name, ax in zip(panels, axes[:, 0], strict=True):
            draw.get(name, partial(draw_curves, name=name))(ax, data)
        finish(fig, axes[:, 0], data, title, width)
    return fig


def check_panels(panels: Sequence[str], data: dict[str, Any]) -> list[str]:
    """The panels to draw: `panels` without "ranks" if there is only one rank. Raises ConfigError
    for unknown panels, or if no panel is left."""
    if isinstance(panels, str) or not panels:
        raise ConfigError(f"panels is {panels!r}; it must be names such as ('gantt', 'budget').")
    for name in panels:
        if name not in PANELS:
            hint = did_you_mean(str(name), PANELS)
            raise ConfigError(f"There is no panel {name!r}; choose from {', '.join(PANELS)}.{hint}")
    drawn = [name for name in panels if name != "ranks" or data["ranks"]]
    if not drawn:
        raise ConfigError(
            "panels is 'ranks' only, and this trace has the times of fewer than 2 ranks; choose "
            "another panel, or trace an engine with tensor_parallel_size=2."
        )
    return drawn


def need(module: str, what: str) -> Any:
    """Import an optional library."""
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise UnsupportedFeatureError(
            f'{what}, which is not installed; run pip install "minillm-course[course]".'
        ) from error


def gantt_height(rows: int) -> float:
    """Height of the Gantt chart in inches: enough to read its rows, and at most a page."""
    return min(max(rows, 2) * (0.2 if rows <= 15 else 0.15), 9.0) + 0.2


def finish(fig: "Figure", axes: Any, data: dict[str, Any], title: str | None, width: float) -> None:
    """Draw the step axis, the legend of the Gantt chart and block map, and the title."""
    from matplotlib.ticker import MaxNLocator

    numbers = data["steps"]["step"]
    axes[-1].set_xlabel("step")
    axes[-1].set_xlim(0, max(len(numbers), 1))
    if numbers:  # ticks at round step numbers; the first column may have any step number
        ticks = MaxNLocator(8, integer=True).tick_values(numbers[0], numbers[-1])
        shown = [int(tick) for tick in ticks if numbers[0] <= tick <= numbers[-1]]
        axes[-1].set_xticks([tick - numbers[0] for tick in shown], [f"{n:,}" for n in shown])
    handles, labels = [], []
    for ax in fig.axes:
        if ax.get_label() in ("gantt", "blocks"):
            more = ax.get_legend_handles_labels()
            handles += more[0]
            labels += more[1]
    if handles:
        fig.legend(handles, labels, loc="outside upper center", handlelength=1.8, fontsize=8,
                   ncols=max(2, min(len(labels), int(width * 0.85))))  # fmt: skip
    if title:
        axes[0].set_title(title, loc="left", parse_math=False)


# ---- the Gantt chart --------------------------------------------------------------------------


def draw_gantt(ax: "Axes", data: dict[str, Any], rows: int) -> None:
    """Draw a row per sequence, a polygon per span, and marks for arrivals and ends."""
    from matplotlib.collections import PolyCollection

    shown = in_rows(data["sequences"])[:rows]
    for order, (kind, state) in enumerate(STATES.items()):
        boxes = [
            box(first, last + 1, row - state.height / 2, row + state.height / 2)
            for row, sequence in enumerate(shown)
            for first, last in bars(sequence["spans"], kind)
        ]
        if boxes:
            edge = "#22282E" if state.hatch else state.colour
            ax.add_collection(
                PolyCollection(boxes, facecolor=state.colour, hatch=state.hatch, label=NAMES[kind],
                               edgecolor=edge, linewidth=0.4, zorder=2 + order / 10, gid=kind)
            )  # fmt: skip
    draw_drafts(ax, shown)
    draw_marks(ax, shown)
    ax.set_label("gantt")
    ax.set_ylim(max(len(shown), 1) - 0.4, -0.6)
    each = 1 if len(shown) <= 40 else 5 if len(shown) <= 100 else 10
    ax.set_yticks(range(0, len(shown), each))
    size = 8 if len(shown) <= 40 else 7
    ax.set_yticklabels([short(sequence["name"]) for sequence in shown[::each]], fontsize=size,
                       parse_math=False)  # fmt: skip
    ax.grid(axis="x", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    if len(shown) < len(data["sequences"]):
        ax.set_title(f"the first {len(shown):,} of {len(data['sequences']):,} sequences",
                     fontsize=8, loc="right")  # fmt: skip


def in_rows(sequences: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sequences by arrival, with the completions of a request together."""
    keys = [(s["parent"] if s["parent"] is not None else i, i) for i, s in enumerate(sequences)]
    return [sequences[index] for _, index in sorted(keys)]


def bars(spans: list[list[Any]], kind: str) -> list[tuple[int, int]]:
    """First and last column of each bar of a kind."""
    found: list[tuple[int, int]] = []
    for name, first, last, *_ in spans:
        if name != kind:
            continue
        if kind in IDLE and found and found[-1][1] == first - 1:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return found


def draw_drafts(ax: "Axes", shown: list[dict[str, Any]]) -> None:
    """Draw the drafts of a step as stacked boxes, the first at the bottom: filled if accepted,
    hollow if rejected."""
    from matplotlib.collections import PolyCollection

    boxes: dict[str, list[Any]] = {name: [] for name, *_ in DRAFTS}
    for row, sequence in enumerate(shown):
        for column, drafted, accepted in sequence["drafts"]:
            each = DRAFTS_HEIGHT / drafted
            for place in range(drafted):
                top = row + DRAFTS_HEIGHT / 2 - place * each  # the axis points down
                name = "accepted draft" if place < accepted else "rejected draft"
                boxes[name].append(box(column + 0.2, column + 0.8, top - each, top))
    for name, inside, edge in DRAFTS:
        if boxes[name]:
            ax.add_collection(
                PolyCollection(boxes[name], facecolor=inside, edgecolor=edge, linewidth=0.5,
                               zorder=3, gid=name, label=name)
            )  # fmt: skip


def draw_marks(ax: "Axes", shown: list[dict[str, Any]]) -> None:
    """Draw arrivals left of the first span, and ends by finish reason right of the last span."""
    from matplotlib.transforms import ScaledTranslation

    size = 18 if len(shown) <= 40 else 9
    marks: dict[str, list[tuple[float, int]]] = {name: [] for name in ("arrival", *ENDS)}
    for row, sequence in enumerate(shown):
        if sequence["spans"] and sequence["parent"] is None:
            marks["arrival"].append((sequence["spans"][0][1], row))
        if sequence["spans"] and sequence["end"] in ENDS:
            marks[sequence["end"]].append((sequence["spans"][-1][2] + 1, row))
    figure = ax.get_figure(root=True)
    for name, places in marks.items():
        if places and figure is not None:
            aside = (-4 if name == "arrival" else 4) / 72  # inches
            xs, ys = zip(*places, strict=True)
            colour = "#D55E00" if name in ("abort", "error") else "#1B1F24"
            ax.scatter(xs, ys, size, colour, marker=ENDS.get(name, ">"),
                       label=MARK_NAMES.get(name, name), zorder=4,
                       linewidths=1.0, clip_on=False, gid=name,
                       transform=ax.transData + ScaledTranslation(aside, 0, figure.dpi_scale_trans),
                       )  # fmt: skip


def short(name: str, most: int = 24) -> str:
    """A name cut to `most` characters, without line breaks."""
    name = "".join(letter if letter.isprintable() else "·" for letter in name)
    return name if len(name) <= most else f"{name[: most - 1]}…"


# ---- curves -----------------------------------------------------------------------------------


def draw_curves(ax: "Axes", data: dict[str, Any], name: str) -> None:
    """Draw curves over the steps, stacked if they are parts of a sum, and their limit."""
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    unit, parts = CURVES[name]
    values = {part: np.asarray(data["steps"][part], float) for part, _ in parts}
    if name == "budget":  # recomputed tokens are also counted in "prefill"
        values["prefill"] = np.maximum(values["prefill"] - values["recomputed"], 0)
    edges = np.arange(len(data["steps"]["step"]) + 1)
    below, highest = np.zeros(len(edges) - 1), 0.0
    looks = cycle((("-", ""), ("--", "//"), (":", "..")))
    for (part, colour), (dash, hatch) in zip(parts if len(below) else (), looks, strict=False):
        curve = values[part] * (1e3 if name == "time" else 1)
        highest = max(highest, curve.max())
        if name in STACKED:
            ax.stairs(below + curve, edges, baseline=below, fill=True, facecolor=colour, ec="white",
                      hatch=hatch, label=part if curve.any() else None)  # fmt: skip
            below = below + curve
        else:
            ax.stairs(curve, edges, baseline=None, color=colour, linestyle=dash, label=part,
                      linewidth=1.3)  # fmt: skip
    limit = {"budget": "max_num_batched_tokens", "free": "num_blocks"}.get(name)
    most = data["meta"][limit] if limit else None
    highest = max([highest, *below])
    if most and (most < 3 * highest or not len(below)):  # a higher limit would flatten the curve
        ax.axhline(most, color="black", linestyle=(0, (5, 3)), linewidth=1,
                   label="limit" if name == "budget" else "blocks")  # fmt: skip
    if name == "queue":
        ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    ax.set_label(name)
    ax.set_ylim(bottom=0)
    ax.margins(y=0.12)
    ax.set_ylabel(unit)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05), fontsize=8, handlelength=1.4)


# ---- the widget -------------------------------------------------------------------------------


def widget(data: dict[str, Any], height: int = 720, title: str = "trace") -> Any:
    """The page as an ipywidgets.HTML, in a sandboxed frame that is isolated from the notebook.

    Raises:
        UnsupportedFeatureError: ipywidgets is not installed.
    """
    widgets = need("ipywidgets", "A widget needs ipywidgets")
    frame = (
        f'<iframe srcdoc="{html.escape(page(data, title))}" sandbox="allow-scripts" '
        f'title="Trace viewer: {html.escape(title)}" '
        f'style="width: 100%; height: {int(height)}px; border: 1px solid #8888; '
        'border-radius: 6px; display: block"></iframe>'
    )
    return widgets.HTML(value=frame)
