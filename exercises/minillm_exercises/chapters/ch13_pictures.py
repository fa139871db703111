"""The pictures of chapter 13: grids, the levels of a code, quality against bits, bytes and time."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from minillm_exercises.chapters.ch13 import Format, Product
from minillm_exercises.chapters.quality import Quality
from minillm_exercises.plots import COLOURS, bars, bound, figure, note, series, show

SHAPES = "os^DvPX*"  # markers, one for each format beside the line


def draw_points(weights: Sequence[float], low: float, step: float, bits: int = 4) -> None:
    """Draw weights above the points of their grid, each with the line to its nearest point."""
    fig, ax = figure("weight", "code below its point", size=(7.6, 2.1))
    for code in range(2**bits):
        point = low + step * code
        ax.plot([point, point], [-0.08, 0.08], color="black", linewidth=1.4)
        ax.annotate(f"{code}", (point, -0.14), ha="center", va="top", fontsize=9)
    for weight in weights:
        code = round((weight - low) / step)
        ax.plot([weight, low + step * code], [0.6, 0.1], color="#888888", linewidth=1.2)
        ax.plot([weight], [0.6], **{**series(0), "linestyle": ""})
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set(ylim=(-0.5, 0.85))
    ax.set_yticks([])
    ax.grid(visible=False)
    worst = max(abs(w - low - step * round((w - low) / step)) for w in weights)
    show(
        fig,
        f"{len(weights)} weights (dots) and the {2**bits} points of their grid. Each weight is "
        f"replaced by the nearest point; here the largest error is {worst / step:.2f} of a step.",
    )


def draw_group(group: Tensor, low: float, high: float) -> None:
    """Draw the histogram of a group of weights, over the grid from `low` to `high` and over its
    own."""
    fig, axes = figure("weight", "weights", cols=2, size=(8.4, 2.7))
    own = float(group.min()), float(group.max())
    used = []
    for ax, (left, right), name in zip(
        axes, ((low, high), own), ("grid of the whole matrix", "grid of the group"), strict=True
    ):
        step = (right - left) / 15
        ax.hist(group.tolist(), bins=40, color=COLOURS[2])
        for code in range(16):
            ax.axvline(left + step * code, color="black", linewidth=0.9, linestyle=":")
        spread = own[1] - own[0]
        ax.set_xlim(own[0] - 0.1 * spread, own[1] + 0.1 * spread)
        ax.set_title(name)
        used.append(len(((group - left) / step).round().unique()))
    show(
        fig,
        f"One group of {len(group)} weights and the points that it may use (dotted). The grid of "
        f"the whole matrix leaves {used[0]} points to this group; with its own grid it uses "
        f"{used[1]}.",
    )


def draw_levels(shares: Tensor, tables: Mapping[str, Sequence[float]]) -> None:
    """Draw how often each code is used, a panel for each table of 16 levels from -1 to 1."""
    fig, axes = figure("weight / largest of its block", "weights (%)", cols=len(tables),
                       size=(8.4, 2.8))  # fmt: skip
    told = []
    for ax, (name, levels) in zip(axes, tables.items(), strict=True):
        table = torch.tensor(levels)
        middles = (table[:-1] + table[1:]) / 2
        counts = torch.bucketize(shares.flatten(), middles).bincount(minlength=16)
        part = 100 * counts / counts.sum()
        edges = [-1.0, *middles.tolist(), 1.0]
        for code in range(16):
            ax.bar(edges[code], float(part[code]), edges[code + 1] - edges[code], align="edge",
                   color=COLOURS[2], edgecolor="black")  # fmt: skip
        ax.plot(levels, [0.0] * 16, color="black", marker="|", markersize=14, linestyle="")
        ax.set(title=name, ylim=(0, 16))
        told.append(f"{part.min():.1f} and {part.max():.1f} % with {name}")
    show(
        fig,
        "How many weights have each of the 16 codes: a bar ranges over the weights of a code, and "
        f"the marks below are the levels. The rarest and the most frequent code have "
        f"{', '.join(told)}.",
    )


def draw_quality(found: Mapping[Format, Quality], joined: Sequence[str]) -> None:
    """Draw KL against bits, and beside it those with 4-bit codes; the formats named in `joined`
    are connected."""
    fig, axes = figure("bits for a weight, scales included", "KL (nats per token, logarithmic)",
                       cols=2, size=(10.4, 3.9))  # fmt: skip
    line = sorted((each.bits, quality.kl) for each, quality in found.items() if each.name in joined)
    near = [quality.kl for each, quality in found.items() if 4 < each.bits < 5]
    for ax, is_near in zip(axes, (False, True), strict=True):
        ax.plot(*zip(*line, strict=True), color=COLOURS[0], linewidth=1.2)
        others = 0
        for each, quality in found.items():
            on_line = each.name in joined
            own = 0 if on_line else 1 + others
            others += not on_line
            ax.plot([each.bits], [quality.kl], color=COLOURS[own % len(COLOURS)], markersize=8,
                    marker=SHAPES[own], linestyle="")  # fmt: skip
            if (4 < each.bits < 5) is is_near or (on_line and not is_near):
                left = each.bits > 8
                at = -8 if left else 8, -10 if is_near and not on_line else 2
                note(ax, each.name, (each.bits, quality.kl), at, ha="right" if left else "left")
        ax.set_yscale("log")
    axes[0].set(xlim=(2.3, 8.6), title="all; the line is int in groups of 32")
    axes[1].set(xlim=(4.05, 4.95), ylim=(0.85 * min(near), 1.15 * max(near)))
    axes[1].set_title("those with 4-bit codes, larger")
    axes[1].yaxis.set_minor_formatter("{x:.2f}")
    falls = [before / after for (_, before), (_, after) in pairwise(line)]
    show(
        fig,
        f"Distance of tiny from itself after rounding, against bits; lower is better. Along the "
        f"line, each additional bit divides it by {min(falls):.1f} to {max(falls):.1f}.",
    )


def draw_products(
    seconds: Mapping[str, float], floors: Mapping[str, float], made: Mapping[str, Product]
) -> None:
    """Draw the time of a product with one row in each format, above the time of reading it."""
    fig, ax = figure("format", "time of a product (ms)", size=(6.2, 3.2))
    for place, (how, value) in enumerate(seconds.items()):
        ax.bar(place, 1e3 * value, 0.6, **bars(place))
        edges, floor = [place - 0.42, place + 0.42], [1e3 * floors[how]] * 2
        ax.plot(edges, floor, color="white", linewidth=3.5)
        label = None if place else "bound: bytes / bandwidth"
        ax.plot(edges, floor, color="black", linestyle="--", linewidth=1.4, label=label)
    names = [f"{how}\n{each.num_bytes / 1e6:.1f} MB" for how, each in made.items()]
    ax.set_xticks(range(len(names)), names)
    ax.grid(visible=False, axis="x")
    fig.legend(loc="outside upper right")
    first, *others = seconds
    told = " and ".join(
        f"{seconds[first] / seconds[how]:.1f} times as fast with {how}" for how in others
    )
    show(
        fig,
        f"Measured: one row times a matrix of {made[first].layers[0].in_features:,} inputs and as "
        f"many outputs; dashed is the time of reading its bytes. Compared with {first}, it is "
        f"{told}.",
    )


def draw_rows(seconds: Mapping[str, Mapping[int, float]], bits: Mapping[str, float]) -> None:
    """Draw how many times as fast as the first format the others are, against rows."""
    fig, ax = figure("rows (logarithmic)", "times as fast as bf16", size=(6.2, 3.2))
    first, *others = seconds
    rows = list(seconds[first])
    for place, how in enumerate(others):
        gains = [seconds[first][row] / seconds[how][row] for row in rows]
        ax.plot(rows, gains, label=how, **series(place))
        bound(ax, rows, [16 / bits[how]] * len(rows), f"{how}: 16 bits / {bits[how]:.4g} bits",
              side="above", at=1.0)  # fmt: skip
    ax.axhline(1, color="black", linewidth=1)
    ax.set_xscale("log", base=4)
    ax.set_xticks(rows, [f"{row}" for row in rows])
    ax.set_ylim(bottom=0)
    ax.legend(loc="lower left")
    last = rows[-1]
    told = ", ".join(f"{seconds[first][last] / seconds[how][last]:.1f} for {how}" for how in others)
    show(
        fig,
        f"Measured: the gain over bf16 against the rows that share one reading of the matrix. With "
        f"{last} rows it is {told}. The dashed lines compare only bytes.",
    )
