"""Chapter 12's pictures: rungs, knees, sizes of graphs, and two clocks side by side."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minillm.config import ModelConfig
from minillm.plan.cost import weight_bytes
from minillm.plan.hardware import Hardware
from minillm_exercises.chapters.ch12 import Rung
from minillm_exercises.chapters.ch12_device import Turn, bubbles
from minillm_exercises.chapters.ch12_recordings import padding
from minillm_exercises.plots import bars, bound, figure, series, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_rungs(panels: Mapping[str, Sequence[Rung]], floors: Mapping[str, float]) -> None:
    """Draw each model's rungs: products and the rest, beside the time of reading its weights."""
    fig, axes = figure(
        "time of a step (ms)", "rung", rows=len(panels), size=(7.4, 2.3 * len(panels))
    )
    for ax, (model, rungs) in zip(axes, panels.items(), strict=True):
        names = [f"{rung.name}\n{rung.calls:,} calls" for rung in rungs]
        products = [1e3 * min(rung.products, rung.seconds) for rung in rungs]
        rest = [1e3 * rung.seconds - done for rung, done in zip(rungs, products, strict=True)]
        ax.barh(names, products, label="matrix products", **bars(0))
        ax.barh(names, rest, left=products, label="everything else", **bars(1))
        ax.axvline(1e3 * floors[model], color="black", linestyle="--", linewidth=1.2)
        ax.annotate(
            "reading the weights",
            (1e3 * floors[model], len(rungs) - 0.3),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=9,
            va="center",
        )
        ax.set_ylim(len(rungs), -0.6)
        ax.set_title(model, fontsize=10, loc="left")
        ax.grid(axis="y", visible=False)
    axes[0].legend(loc="lower right")
    said = "; ".join(
        f"{model} {1e3 * rungs[0].seconds:.3g} ms in {rungs[0].name}, "
        f"{1e3 * rungs[-1].seconds:.3g} ms on its last rung ({rungs[-1].name})"
        for model, rungs in panels.items()
    )
    show(
        fig,
        f"Each bar is one decode step, and only a model that stays in a cache can end left of its "
        f"dashed line, the weights read from memory: {said}.",
    )


def draw_knees(
    sizes: Sequence[int],
    seconds: Sequence[float],
    price: float,
    rate: float,
    card: Hardware,
    models: Mapping[str, ModelConfig],
    launches: Sequence[int],
) -> None:
    """Draw products of growing size on this machine beside the layers of `models` on a `card`."""
    fig, (left, right) = figure("bytes of the weight", "time (µs)", cols=2, size=(9.6, 3.9))
    micro = [1e6 * each for each in seconds]
    left.plot(sizes, micro, label="measured product of one row", **series(0))
    model = [1e6 * (price + size / rate) for size in sizes]
    left.plot(sizes, model, "k--", linewidth=1.2, label="call + bytes from memory")
    left.axvline(price * rate, color="grey", linestyle=":", label="knee")
    left.set_title("this machine", fontsize=10, loc="left")
    left.legend(loc="upper left", frameon=True, framealpha=1, edgecolor="none")
    layers = {
        name: weight_bytes(config, "bfloat16") / config.num_layers
        for name, config in models.items()
    }
    ends = min(layers.values()) / 2, max(layers.values()) * 2
    bound(right, ends, [1e6 * size / card.bandwidth for size in ends], "bytes ", side="above")
    for number, count in enumerate(launches):
        style = {key: series(number + 1)[key] for key in ("color", "linestyle")}
        height = 1e6 * count * card.overhead
        right.plot(ends, [height] * 2, label=f"{count} launches a layer", **style)
    for number, (name, size) in enumerate(layers.items()):
        mark = series(number) | {"linestyle": "none", "markersize": 8}
        right.plot([size], [1e6 * size / card.bandwidth], label=name, **mark)
    right.set_title(f"bounds of a layer, {card.name} (computed)", fontsize=10, loc="left")
    right.set_xlabel("bytes of the layer")
    right.legend(loc="upper left", bbox_to_anchor=(1, 1))
    for ax in (left, right):
        ax.set(xscale="log", yscale="log")
        ax.yaxis.set_major_formatter("{x:,g}")
    left.set_ylim(top=15 * max(*model, *micro))  # the legend is above the curve
    over = [
        name for name, size in layers.items() if size / card.bandwidth < launches[0] * card.overhead
    ]
    show(
        fig,
        f"Left of its knee a product takes the time of a call; at {launches[0]} launches a layer "
        f"{', '.join(over)} lie below the line of launches, so launches decide.",
    )


def draw_padding(
    seen: Mapping[int, int], sizes: Sequence[int], choices: Mapping[str, Sequence[int]]
) -> None:
    """Draw how often each batch size came, with the `sizes` of graphs, and what choices pad."""
    fig, (left, right) = figure("rows of a decode step", "steps", cols=2, size=(9.2, 3.6))
    left.bar(list(seen), list(seen.values()), width=0.9, color=series(2)["color"])
    for size in sizes:
        left.axvline(size + 0.5, color="black", linestyle="--", linewidth=0.8)
    left.set_title("dashed: the engine's sizes", fontsize=10, loc="left")
    rows = sum(size * steps for size, steps in seen.items())
    names = [f"{name}\n(graphs: {len(choice)})" for name, choice in choices.items()]
    spare = [padding(seen, choice) for choice in choices.values()]
    right.barh(names, [rows] * len(names), label="rows of requests", **bars(0))
    right.barh(names, spare, left=[rows] * len(names), label="padding", **bars(1))
    right.set(xlabel="rows computed", ylabel="graphs for")
    right.invert_yaxis()
    right.xaxis.set_major_formatter("{x:,.0f}")
    right.legend(loc="lower right", frameon=True, framealpha=1)
    said = ", ".join(f"{name} {count:,}" for name, count in zip(choices, spare, strict=True))
    show(fig, f"A batch runs in the next size up; rows of padding beside {rows:,} real: {said}.")


def draw_clocks(runs: Mapping[str, Sequence[Turn]], until: int) -> None:
    """Draw when the processor plans and the simulated device computes, for each way to run."""
    fig, axes = figure("virtual time (µs)", "who", rows=len(runs), size=(8.4, 1.9 * len(runs)))
    for ax, (name, turns) in zip(axes, runs.items(), strict=True):
        for number, turn in enumerate(turns):
            style: dict[str, Any] = {"height": 0.7} | bars(number % 2)
            _piece(ax, turn.planned, 1, style, "", until)
            _piece(ax, turn.computed, 0, style, f"step {number + 1}", until)
        ax.set_yticks([0, 1], ["simulated device", "processor"])
        ax.set_xlim(0, until)
        ax.set_ylim(-0.5, 1.5)
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.grid(axis="y", visible=False)
        ax.set_title(f"{name}: {bubbles(turns)} bubbles in {len(turns)} steps", loc="left", size=10)
    said = ", ".join(f"{name} {turns[-1].computed[1]:,} µs" for name, turns in runs.items())
    show(fig, f"White gaps in a device's row are bubbles, and the last step ends at: {said}.")


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
