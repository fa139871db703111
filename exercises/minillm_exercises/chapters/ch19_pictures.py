"""The pictures and tables of chapter 19: cut matrices, sums in a ring, distributions, prices."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

from minillm.lab.links import LINKS, all_reduce
from minillm_exercises.plots import bars, box, figure, series, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

RANKS: tuple[dict[str, Any], ...] = (
    {"facecolor": "#9ecae1", "edgecolor": "black"},
    {"facecolor": "#fdd49e", "edgecolor": "black", "hatch": "//"},
    {"facecolor": "#c7e9c0", "edgecolor": "black", "hatch": ".."},
)
LINK_NAMES = {"pcie": "PCIe", "nvlink": "NVLink"}
ALL: dict[str, Any] = {"facecolor": "white", "edgecolor": "black"}


def _matrix(ax: "Axes", left: float, top: float, values: Sequence[Sequence[object]], title: str,
            looks: Sequence[Sequence[Mapping[str, Any]]]) -> None:  # fmt: skip
    """Boxes with numbers, from (left, top) to the right and down, with a title above."""
    for row, (numbers, colours) in enumerate(zip(values, looks, strict=True)):
        for column, (number, look) in enumerate(zip(numbers, colours, strict=True)):
            plain = {"boxstyle": "square,pad=0.1", "facecolor": look["facecolor"], "linewidth": 0}
            box(ax, left + column, top + row, 1, 1, look, f"{number}", fontsize=11, bbox=plain)
    ax.text(left + len(values[0]) / 2, top - 0.25, title, ha="center", va="bottom", fontsize=10)


def _whole(values: "Tensor") -> list[list[int]]:
    return [[int(each) for each in row] for row in values.tolist()]


def draw_pair(x: "Tensor", up: "Tensor", down: "Tensor", size: int) -> None:
    """Draw a pair of matrices that is cut among `size` ranks, with the numbers of one input: rows
    of the first, columns of the second, and the parts that are added up.

    Args:
        x: [1, d], whole numbers.
        up: [units, d]; `size` divides the units.
        down: [d, units].
    """
    units, each = len(up), len(up) // size
    hidden = (x @ up.T).relu()
    parts = [
        hidden[:, rank * each : (rank + 1) * each] @ down[:, rank * each : (rank + 1) * each].T
        for rank in range(size)
    ]
    of = [RANKS[unit // each] for unit in range(units)]
    fig, ax = figure("one input, from left to right", "cut among ranks", size=(9.4, 3.3))
    _matrix(ax, 0, 1, [[int(v)] for v in x[0]], "x", [[ALL]] * x.shape[1])
    _matrix(ax, 2.4, 0, _whole(up), "up: cut by rows", [[of[unit]] * up.shape[1]
            for unit in range(units)])  # fmt: skip
    _matrix(ax, 5.8, 0, [[int(v)] for v in hidden[0]], "hidden", [[look] for look in of])
    _matrix(ax, 8.2, 1, _whole(down), "down: cut by columns", [of] * len(down))
    left = 8.2 + units + 1.4
    for rank, part in enumerate(parts):
        look = [[RANKS[rank]]] * part.shape[1]
        _matrix(ax, left, 1, [[int(v)] for v in part[0]], f"part {rank}", look)
        sign = "+" if rank < size - 1 else "="
        ax.text(left + 1.6, 2, sign, ha="center", va="center", fontsize=15)
        left += 2.2
    total = sum(parts[1:], parts[0])
    _matrix(ax, left, 1, [[int(v)] for v in total[0]], "sum", [[ALL]] * total.shape[1])
    for at, word in ((1.7, "→"), (5.1, "→"), (7.5, "→"), (8.2 + units + 0.7, "→")):
        ax.text(at, 2, word, ha="center", va="center", fontsize=14)
    _ranks_legend(fig, size)
    _blank(ax, left + 1.3, units)
    shown = " + ".join(str(_whole(part)[0]) for part in parts)
    show(
        fig,
        f"A layer cut among {size} ranks. White boxes are on every rank. Each rank multiplies its "
        f"rows of the first matrix and its columns of the second, and the parts are added up: "
        f"{shown} = {_whole(total)[0]}.",
    )


def _ranks_legend(fig: Any, size: int) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(label=f"rank {rank}", **RANKS[rank]) for rank in range(size)]
    fig.legend(handles=handles, loc="outside lower center", ncols=size, fontsize=9)


def _blank(ax: "Axes", right: float, low: float) -> None:
    """A drawing without axes."""
    ax.set(xlim=(-0.3, right), ylim=(low + 0.2, -1.0), aspect="equal")
    ax.axis("off")


def draw_ring(size: int, others: int) -> None:
    """Draw which rank begins the sum of each chunk in a ring, for one row alone and for the same
    row above `others` more."""
    width = 2 * size
    fig, axes = figure("values of a row", "row", cols=2, size=(8.6, 2.5))
    for ax, rows in zip(axes, (1, 1 + others), strict=True):
        first = [place * size // (rows * width) for place in range(rows * width)]
        numbers = [first[row * width : (row + 1) * width] for row in range(rows)]
        looks = [[RANKS[rank] for rank in row] for row in numbers]
        title = "the row alone" if rows == 1 else f"the same row above {others} others"
        _matrix(ax, 0, 0, numbers, title, looks)
        _blank(ax, width + 0.3, 1 + others)
    _ranks_legend(fig, size)
    show(
        fig,
        f"A ring of {size} ranks cuts the whole tensor into {size} chunks. The number in a cell is "
        f"the rank at which the sum of this value begins. With more rows below it, the "
        f"same top row is cut at other places.",
    )


def draw_dist(right: Sequence[Fraction], wrong: Sequence[Fraction], size: int) -> None:
    """Draw the probability of each token, and what becomes of it with local noise."""
    fig, ax = figure("token", "probability (%)", size=(7.2, 3.4))
    for number, (name, dist) in enumerate(
        (("noise by the token's number", right), ("every rank counts from 0", wrong))
    ):
        at = [token + 0.4 * number - 0.2 for token in range(len(dist))]
        ax.bar(at, [100 * float(each) for each in dist], 0.38, label=name, **bars(number))
    each = len(right) // size
    top = 112 * float(max(*right, *wrong))
    for rank in range(1, size):
        ax.axvline(rank * each - 0.5, color="black", linewidth=1)
    for rank in range(size):
        ax.text(rank * each - 0.4, top, f"rank {rank}", va="top", fontsize=9)
    ax.set(ylim=(0, 1.04 * top))
    ax.set_xticks(range(len(right)))
    ax.legend(loc="upper right", bbox_to_anchor=(1.0, 0.94))
    never = sum(not each for each in wrong)
    show(
        fig,
        f"The distribution of a token on {size} ranks: if every rank counts its tokens from 0, "
        f"{never} of {len(wrong)} tokens are never drawn: their rivals have the same noise.",
    )


def draw_sums(
    marks: Mapping[str, int], ranks: int, links: Sequence[str] = ("pcie", "nvlink")
) -> None:
    """Draw the time of a sum against its bytes, and where the sums of some steps lie."""
    fig, ax = figure("bytes of each rank (logarithmic)", "time of a sum (µs, logarithmic)",
                     size=(7.4, 4.0))  # fmt: skip
    sizes = [2**power for power in range(12, 27)]
    for number, name in enumerate(links):
        micros = [_micros(name, ranks, each) for each in sizes]
        ax.plot(sizes, micros, label=LINK_NAMES[name], **(series(number) | {"marker": None}))
        for num_bytes in marks.values():
            look = series(number) | {"linestyle": "none", "markersize": 7}
            ax.plot([num_bytes], [_micros(name, ranks, num_bytes)], **look)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    at = (12, 15, 18, 20, 22, 25)
    ax.set_xticks([2**p for p in at], [f"{2 ** (p - 10)} KiB" if p < 20 else f"{2 ** (p - 20)} MiB"
                                       for p in at])  # fmt: skip
    ax.set_ylim(2, 6000)
    ax.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
    for name, num_bytes in marks.items():
        ax.axvline(num_bytes, color="#999999", linewidth=0.8, linestyle=":")
        ax.text(num_bytes, 6500, name, va="bottom", ha="center", fontsize=9)
    ax.legend(loc="upper left")
    small = min(marks.values())
    told = ", ".join(f"{_micros(n, ranks, small):.0f} µs over {LINK_NAMES[n]}" for n in links)
    show(
        fig,
        f"A sum over {ranks} ranks: a small one costs its latency, {told}, and a large one its "
        f"bytes. The dotted lines are the sums of three kinds of step.",
    )


def _micros(link: str, ranks: int, num_bytes: int) -> float:
    return 1e6 * all_reduce(LINKS[link], ranks, num_bytes).seconds


def draw_line(
    ax: Any, values: Mapping[int, float], number: int, name: str, fits: Callable[[int], bool]
) -> None:
    """Draw times as fast as one GPU; the markers of GPUs that do not hold the work are hollow."""
    look = series(number)
    ax.plot(list(values), list(values.values()), label=name, **look)
    for gpus, value in values.items():
        if not fits(gpus):
            ax.plot([gpus], [value], **(look | {"markerfacecolor": "white", "zorder": 5}))


def draw_speed_ups(
    found: Mapping[str, Mapping[str, Mapping[int, float]]],
    what: str,
    fits: Callable[[str, int], bool] = lambda step, ranks: True,
) -> None:
    """Draw times as fast as one GPU against the number of ranks: kind of step -> link -> ranks.

    Args:
        fits: whether so many GPUs hold the model and the caches of this kind of step.
    """
    fig, _ = figure("ranks", "times as fast as one", cols=len(found), size=(9.6, 3.5))
    for ax, (step, links) in zip(fig.axes, found.items(), strict=True):
        counts = list(next(iter(links.values())))
        ax.plot(counts, counts, "k--", linewidth=1.2, label="n ranks, n times")
        for number, (name, values) in enumerate(links.items()):
            draw_line(ax, values, number, name, partial(fits, step))
        ax.axhline(1, color="#999999", linewidth=0.8)
        ax.set(title=step, ylim=(0, max(counts) + 0.3))
        ax.set_xticks(counts)
    handles, labels = fig.axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    for ax in fig.axes[1:]:
        ax.set_ylabel("")
    gaining = [
        name
        for name in next(iter(found.values()))
        if all(speed > 1 for links in found.values() for n, speed in links[name].items() if n > 1)
    ]
    show(
        fig,
        f"Predicted speed of {max(counts)} ranks and fewer, {what}. Only over "
        f"{' and '.join(gaining) or 'a faster link'} does every kind of step gain. Hollow: these "
        f"GPUs do not hold the model and the caches of the step, so their speed is computed for "
        f"larger ones.",
    )
