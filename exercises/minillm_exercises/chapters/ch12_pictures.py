"""Chapter 12's pictures: host and device, rungs, launches, sizes of graphs, two ways to plan."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from minillm_exercises.chapters.ch12 import WHOLE, Rung, fits_cache
from minillm_exercises.chapters.ch12_device import Turn, bubbles
from minillm_exercises.chapters.ch12_recordings import padding
from minillm_exercises.plots import bars, figure, note, series, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Span = tuple[int, int]  # from, to


def draw_rungs(
    panels: Mapping[str, Sequence[Rung]], floors: Mapping[str, float], sizes: Mapping[str, float]
) -> None:
    """Draw each model's rungs: products and the rest, beside the time of reading its weights.

    Args:
        floors: seconds of reading a model's weights from memory.
        sizes: bytes that a step of the model reads.
    """
    fig, axes = figure(
        "time of a step (ms)", "rung", rows=len(panels), size=(7.4, 2.3 * len(panels))
    )
    for ax, (model, rungs) in zip(axes, panels.items(), strict=True):
        names = [f"{rung.name}\n{rung.calls:,} calls" for rung in rungs]
        split = [rung.name != WHOLE for rung in rungs]  # the one call is not divided
        parts = [1e3 * min(rung.products, rung.seconds) for rung in rungs]
        products = [part * one for part, one in zip(parts, split, strict=True)]
        rest = [1e3 * rung.seconds - done for rung, done in zip(rungs, products, strict=True)]
        others = [each * one for each, one in zip(rest, split, strict=True)]
        whole = [each * (not one) for each, one in zip(rest, split, strict=True)]
        ax.barh(names, products, label="matrix products", **bars(0))
        ax.barh(names, others, left=products, label="everything else", **bars(1))
        if any(whole):
            ax.barh(names, whole, label="both, in one call", **bars(2))
        ax.axvline(1e3 * floors[model], color="black", linestyle="--", linewidth=1.2)
        note(ax, "reading the weights", (1e3 * floors[model], len(rungs) - 0.3), (4, 0),
             va="center")  # fmt: skip
        ax.set_ylim(len(rungs), -0.6)
        ax.set_title(model, fontsize=10, loc="left")
        ax.grid(axis="y", visible=False)
    axes[0].legend(loc="lower right")
    said = " and ".join(
        f"{rungs[0].seconds / rungs[-1].seconds:.3g} times as fast with {model}"
        for model, rungs in panels.items()
    )
    show(
        fig,
        f"Measured: each bar is one decode step. From the first rung to the last it becomes {said}."
        f"{_faster(panels, floors, sizes)}",
    )


def _faster(
    panels: Mapping[str, Sequence[Rung]], floors: Mapping[str, float], sizes: Mapping[str, float]
) -> str:
    """Which bars end left of their dashed line, and why: only weights in a cache allow it."""
    under = [
        name
        for name in panels
        if fits_cache(sizes[name]) and min(each.seconds for each in panels[name]) < floors[name]
    ]
    return "".join(
        f" The weights of {name} fit into a cache, so its bars can end left of the dashed line."
        for name in under
    )


def draw_timeline(runs: Mapping[str, tuple[Sequence[Span], Sequence[Span]]]) -> None:
    """Draw when the host launches and the simulated device computes, one panel for each run."""
    fig, axes = figure("time (µs, simulated)", "who", rows=len(runs), size=(7.6, 1.7 * len(runs)))
    until = max(device[-1][1] for _, device in runs.values()) + 3
    for ax, (name, (host, device)) in zip(axes, runs.items(), strict=True):
        for number, (launch, kernel) in enumerate(zip(host, device, strict=True), 1):
            style = _style(number)
            word = "graph" if launch[1] > launch[0] and host[-1][1] == host[0][1] else str(number)
            _piece(ax, launch, 1, style, word if launch[1] > launch[0] else "", until)
            _piece(ax, kernel, 0, style, str(number), until)
        ax.set_yticks([0, 1], ["device", "host"])
        ax.set(xlim=(0, until), ylim=(-0.5, 1.5))
        ax.grid(axis="y", visible=False)
        ax.set_title(f"{name}: done after {device[-1][1]} µs", loc="left", size=10)
    late = [
        name
        for name, (_, device) in runs.items()
        if any(after[0] > before[1] for before, after in pairwise(device))
    ]
    said = f"does so with {' and '.join(late)}" if late else "never does so"
    show(
        fig,
        f"Simulated: each number is one call, launched by the host and computed by the device. In "
        f"a white gap the device waits for the host between two kernels; it {said}.",
    )


def draw_launches(
    models: Mapping[str, tuple[Sequence[float], float]], counts: Sequence[int]
) -> None:
    """Draw for each model the milliseconds of all launches, for each of `counts` launches a layer,
    beside the bound of its step."""
    fig, ax = figure("time of a step (ms, logarithmic)", "model", size=(8.2, 3.9))
    high = 0.8 / len(counts)
    for row, count in enumerate(counts):
        places = [number + (row - (len(counts) - 1) / 2) * high for number in range(len(models))]
        label = f"{count} launches a layer, 5 µs each"
        look = series(row) | {"linestyle": "none", "markersize": 9}
        ax.plot([times[row] for times, _ in models.values()], places, label=label, **look)
    for number, (_, least) in enumerate(models.values()):
        note = "bound (bytes or operations)" if number == 0 else "_nolegend_"
        ax.plot([least] * 2, [number - 0.45, number + 0.45], "k--", linewidth=1.8, label=note)
    ax.set_yticks(range(len(models)), list(models))
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.grid(axis="y", visible=False)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    over = [name for name, (times, least) in models.items() if times[0] > least]
    show(
        fig,
        f"Computed, not measured. Where a point lies right of its dashed line, the launches take "
        f"longer than the work: at {counts[0]} launches a layer this holds for {', '.join(over)}.",
    )


def draw_padding(
    seen: Mapping[int, int], sizes: Sequence[int], choices: Mapping[str, Sequence[int]]
) -> None:
    """Draw how often each batch size came, with the `sizes` of graphs, and what choices pad."""
    fig, (left, right) = figure("rows of a decode step", "steps", cols=2, size=(9.2, 3.6))
    left.bar(list(seen), list(seen.values()), width=0.9, color=series(2)["color"])
    for size in sizes:
        left.axvline(size + 0.5, color="black", linestyle=":", linewidth=0.8)
    left.set_title("dotted: the engine's sizes", fontsize=10, loc="left")
    rows = sum(size * steps for size, steps in seen.items())
    names = [f"{name}\n(graphs: {len(choice)})" for name, choice in choices.items()]
    spare = [padding(seen, choice) for choice in choices.values()]
    right.barh(names, [rows] * len(names), label="rows of requests", **bars(0))
    right.barh(names, spare, left=[rows] * len(names), label="padding", **bars(1))
    right.set(xlabel="rows computed", ylabel="graphs for")
    right.invert_yaxis()
    right.xaxis.set_major_formatter("{x:,.0f}")
    right.legend(loc="lower right", frameon=True, framealpha=1)
    show(
        fig,
        f"Counted: each batch runs in the next larger size. The more sizes there are, the fewer "
        f"rows are padding: from {spare[0]:,} down to {spare[-1]:,}, beside {rows:,} rows of "
        f"requests.",
    )


def draw_clocks(runs: Mapping[str, Sequence[Turn]], until: int) -> None:
    """Draw when the processor plans and the simulated device computes, for each way to run."""
    fig, axes = figure("time (µs, simulated)", "who", rows=len(runs), size=(8.4, 1.9 * len(runs)))
    for ax, (name, turns) in zip(axes, runs.items(), strict=True):
        for number, turn in enumerate(turns):
            style = _style(number)
            _piece(ax, turn.planned, 1, style, "", until)
            _piece(ax, turn.computed, 0, style, f"step {number + 1}", until)
        ax.set_yticks([0, 1], ["simulated device", "processor"])
        ax.set_xlim(0, until)
        ax.set_ylim(-0.5, 1.5)
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.grid(axis="y", visible=False)
        ax.set_title(f"{name}: {bubbles(turns)} bubbles in {len(turns)} steps", loc="left", size=10)
    (slow, late), (quick, soon) = ((name, turns[-1].computed[1]) for name, turns in runs.items())
    show(
        fig,
        f"Simulated: white gaps in the device's row are bubbles. The last step ends "
        f"{late - soon:,} µs earlier with '{quick}' than with '{slow}'.",
    )


def _style(number: int) -> dict[str, Any]:
    """Two looks in turn, only to tell neighbours apart."""
    return {"height": 0.7, **bars(2 * (number % 2))}


def _piece(
    ax: "Axes", span: tuple[int, int], lane: int, style: Mapping[str, Any], name: str, until: int
) -> None:
    """One piece of work in its lane, with its name where there is room."""
    if span[0] >= until:
        return
    ax.barh([lane], [span[1] - span[0]], left=[span[0]], **style)
    middle = sum(span) / 2
    if name and middle < 0.96 * until:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        ax.text(middle, lane, name, ha="center", va="center", fontsize=8, bbox=box)
