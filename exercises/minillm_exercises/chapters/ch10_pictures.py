"""The pictures of chapter 10: a rescale, elements moved, the walk, growth."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minillm_exercises.chapters.ch10 import LOOPS, ratio
from minillm_exercises.errors import ExerciseError
from minillm_exercises.plots import COLOURS, bars, bound, box, figure, series, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Visit = tuple[int, int]  # block of queries, block of keys

FAST: dict[str, Any] = {"facecolor": COLOURS[5], "edgecolor": "black", "linewidth": 1.8}
DONE: dict[str, Any] = {"facecolor": "#d6e9f5", "edgecolor": "#888888", "linewidth": 0.8}
LATER: dict[str, Any] = {"facecolor": "white", "edgecolor": "#888888", "linewidth": 0.8}
SKIPPED: dict[str, Any] = {"facecolor": "#f3f3f3", "edgecolor": "#c4c4c4", "hatch": "x",
                           "linewidth": 0.5}  # fmt: skip


def draw_rescale(scores: Sequence[float], values: Sequence[float]) -> None:
    """The weights exp(s - m) of one row after each score, with m, z and o; a new largest score
    shrinks all weights before it, whose old heights are dashed."""
    fig, axes = figure("score", "weight, exp(s − m)", cols=len(scores), size=(8.2, 2.8))
    before: list[float] = []
    largest, factor = scores[0], 1.0
    for step, ax in enumerate(axes, 1):
        m = max(scores[:step])
        weights = [math.exp(score - m) for score in scores[:step]]
        ax.bar(range(step - 1), weights[:-1], **bars(0))
        ax.bar([step - 1], weights[-1:], **bars(1))
        if m > largest:
            factor = math.exp(largest - m)
            ax.bar(range(step - 1), before, fill=False, edgecolor="black", linestyle="--")
            ax.annotate(f"× {factor:.2f}", (0.15, weights[0]), xytext=(0.95, before[0] / 2),
                        ha="center", arrowprops={"arrowstyle": "->"}, fontsize=8)  # fmt: skip
        total = math.fsum(weights)
        summed = math.fsum(w * v for w, v in zip(weights, values, strict=False))
        ax.set_title(f"m = {m:,}\nz = {total:.2f}\no = {summed:.1f}", fontsize=10, loc="left")
        ax.set_xticks(range(len(scores)), [f"{score}" for score in scores], fontsize=8)
        ax.set(ylim=(0, 1.1), xlim=(-0.6, len(scores) - 0.4))
        ax.set_ylabel("" if step > 1 else "weight, exp(s − m)")
        ax.grid(visible=False)
        before, largest = weights, m
    show(
        fig,
        f"One row after each of {len(scores)} scores; the newest is hatched. The score {largest:,} "
        f"is a new maximum, so the weights before it, with their sums z and o, shrink to "
        f"{factor:.2f} of the dashed heights. The result is o / z = {summed / total:.1f}.",
    )


def draw_traffic(
    counted: Mapping[tuple[str, int, int], float], tokens: int, widths: Sequence[int]
) -> None:
    """Draw what the two loops move in units of standard attention, by formula; `counted` are
    points (loop, width, block)."""
    fig, axes = figure(
        "block (tokens, logarithmic)",
        "elements moved / standard (times)",
        cols=len(widths),
        size=(7.4, 2.8),
    )
    blocks = list(range(32, 513))
    for ax, width in zip(axes, widths, strict=True):
        for number, loop in enumerate(LOOPS[1:]):
            look = series(number)
            line = [float(ratio(loop, width, block, tokens)) for block in blocks]
            ax.plot(blocks, line, color=look["color"], linestyle=("-", "-.")[number])
            points = sorted(
                (b, r) for (name, w, b), r in counted.items() if (name, w) == (loop, width)
            )
            ax.plot(*zip(*points, strict=True), color=look["color"], marker=look["marker"],
                    linestyle="", markersize=7)  # fmt: skip
            ax.plot([], [], label=loop, color=look["color"], marker=look["marker"],
                    linestyle=("-", "-.")[number])  # fmt: skip
        bound(ax, blocks, [1.0] * len(blocks), "standard attention", side="above", at=1.0)
        ax.set_xscale("log", base=2)
        ax.set(ylim=(0, 3.05), title=f"head width {width}")
        ax.xaxis.set_major_formatter(lambda block, _: f"{block:g}")
        ax.legend(loc="upper right")
    worst = max(counted, key=lambda key: counted[key])
    show(
        fig,
        f"Elements that cross between slow and fast memory, lines by formula, marks counted: above "
        f"1 a loop moves more than standard attention, as {worst[0]!r} does with blocks of "
        f"{worst[2]} and heads of {worst[1]}, {counted[worst]:.2f} times.",
    )


def visits(order: str, blocks: int) -> list[Visit]:
    """The tiles of a causal table in the order in which a loop computes them.

    Raises:
        ExerciseError: an unknown order.
    """
    if order not in LOOPS[1:]:
        raise ExerciseError(f"order is {order!r}; it must be one of {', '.join(LOOPS[1:])}.")
    pairs = [(query, key) for query in range(blocks) for key in range(query + 1)]
    return sorted(pairs, key=lambda pair: pair[::-1]) if order == LOOPS[1] else pairs


def transfers(order: str, walk: Sequence[Visit]) -> dict[str, int]:
    """Tiles that have come ("Q in" ...) and gone ("O out") after these visits."""
    if order == LOOPS[1]:
        keys, steps = len({key for _, key in walk}), len(walk)
        return {"K, V in": 2 * keys, "Q in": steps, "O in": steps, "O out": steps}
    queries = len({query for query, _ in walk})
    done = sum(query == key for query, key in walk)  # a row of tiles ends on the diagonal
    return {"K, V in": 2 * len(walk), "Q in": queries, "O in": 0, "O out": done}


def draw_walk(step: int, blocks: int = 6) -> None:
    """Draw both loops after `step` tiles of a causal table of `blocks` by `blocks` tiles."""
    fig, axes = figure("keys", "queries", cols=2, size=(7.4, 4.3))
    for ax, order in zip(axes, LOOPS[1:], strict=True):
        walk = visits(order, blocks)
        _table(ax, walk, step, blocks)
        _margins(ax, walk[step - 1], blocks)
        counts = transfers(order, walk[:step])
        told = ",  ".join(f"{name} {count}" for name, count in counts.items())
        ax.set_title(f"{order} (FlashAttention {1 + LOOPS[1:].index(order)})", fontsize=11, pad=8)
        ax.set_xlabel(f"tiles moved so far:  {told}\nin all {sum(counts.values())}", fontsize=8)
        ax.set_ylabel("")
    both = [sum(transfers(order, visits(order, blocks)[:step]).values()) for order in LOOPS[1:]]
    left = blocks * (blocks - 1) // 2
    show(
        fig,
        f"Both loops after tile {step}; orange is in fast memory, numbers are the order of the "
        f"visits, and the {left} crossed tiles behind the diagonal are skipped. With the keys "
        f"outside {both[0]} tiles have moved, with the queries outside {both[1]}.",
    )


def _table(ax: "Axes", walk: Sequence[Visit], step: int, blocks: int) -> None:
    from matplotlib.patches import Polygon

    order = {visit: number for number, visit in enumerate(walk, 1)}
    for query in range(blocks):
        for key in range(blocks):
            number = order.get((query, key))
            look = SKIPPED if number is None else FAST if number == step else DONE
            look = LATER if number and number > step else look
            box(ax, key, query, 1, 1, {**look, "zorder": 3 if look is FAST else 1})
            if number is None:
                continue
            if query == key:  # half of a tile on the diagonal is hidden
                corners = [(key, query), (key + 1, query), (key + 1, query + 1)]
                ax.add_patch(Polygon(corners, zorder=4, **SKIPPED))
            where = (0.3, 0.7) if query == key else (0.5, 0.5)
            ax.text(key + where[0], query + where[1], str(number), ha="center", va="center",
                    fontsize=10, zorder=5)  # fmt: skip
    ax.set(xlim=(-1.5, blocks + 1.5), ylim=(blocks + 0.1, -2.5), aspect="equal")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.grid(visible=False)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)


def _margins(ax: "Axes", now: Visit, blocks: int) -> None:
    query, key = now
    for at in range(blocks):
        for name, x, y, inside in (
            ("K", at, -2.3, at == key),
            ("V", at, -1.3, at == key),
            ("Q", -1.3, at, at == query),
            ("O", blocks + 0.3, at, at == query),
        ):
            look = FAST | {"zorder": 3} if inside else LATER | {"zorder": 1}
            width, height = (1, 0.8) if name in "KV" else (0.9, 1)
            box(ax, x, y, width, height, look, f"{name}{at + 1}", fontsize=9, zorder=5)


def draw_growth(
    lengths: Sequence[int],
    largest: Mapping[str, Sequence[int]],
    seconds: Mapping[str, Sequence[float]],
    least: Sequence[float],
    result: Sequence[int],
    device: str = "cpu",
) -> None:
    """Draw the largest tensor that each way made, in elements of float32, and its time.

    Args:
        least: seconds, the bound of the time.
        result: elements of the result, the bound of the largest tensor.
    """
    fig, (left, right) = figure(
        "tokens (logarithmic)", "largest tensor (MiB, logarithmic)", cols=2, size=(7.6, 3.1)
    )
    for number, (way, counts) in enumerate(largest.items()):
        left.plot(lengths, [4 * count / 2**20 for count in counts], label=way, **series(number))
    for number, (way, times) in enumerate(seconds.items()):
        right.plot(lengths, [1e3 * each for each in times], label=way, **series(number))
    bound(left, lengths, [4 * count / 2**20 for count in result], "bound: the result", "below", 0.0)
    bound(right, lengths, [1e3 * each for each in least], "bound: operations / rate", at=0.0)
    right.set_ylabel("time (ms, logarithmic)")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.minorticks_off()
        ax.set_xticks(lengths, [f"{length:,}" for length in lengths])
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.legend(loc="upper left")
    left.set_ylim(result[0] / 2**20, None)
    slowest = max(max(times) for times in seconds.values())
    right.set_ylim(1e3 * least[0] / 4, 3e4 * slowest)
    ranked = sorted(seconds, key=lambda way: seconds[way][-1])
    first, last = ((way, seconds[way][-1] / least[-1]) for way in (ranked[0], ranked[-1]))
    grown = ", ".join(f"{way} {counts[-1] / counts[0]:g} times" for way, counts in largest.items())
    show(
        fig,
        f"One causal head in float32, {lengths[0]:,} to {lengths[-1]:,} tokens. The largest tensor "
        f"grows: {grown}. At the right end (measured, {device.upper()}), {first[0]!r} takes "
        f"{first[1]:.1f} times the bound and {last[0]!r} {last[1]:.0f} times.",
    )
