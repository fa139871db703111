"""The pictures of chapter 07: a block table, reservations, the memory over time, block sizes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minillm_exercises.chapters.ch07 import CAP, Moment, Work, average
from minillm_exercises.plots import COLOURS, box, figure, series, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = ("used", "used later", "never used", "free")
LOOKS: tuple[dict[str, Any], ...] = (
    {"facecolor": COLOURS[0], "edgecolor": COLOURS[0]},
    {"facecolor": "#bfdcef", "edgecolor": COLOURS[0], "hatch": "/"},
    {"facecolor": "#dd9257", "edgecolor": COLOURS[1], "hatch": "."},
    {"facecolor": "white", "edgecolor": "#aaaaaa"},
)


def draw_reservations(works: Sequence[Work], computed: int, cap: int = CAP) -> None:
    """Draw what each reservation is for when every request has computed `computed` tokens."""
    fig, ax = figure("slots", "request", size=(7.5, 4))
    for row, work in enumerate(works, 1):
        left, now = 0, min(work.total, max(computed, work.prompt))
        for kind, width in enumerate((now, work.total - now, cap - work.total)):
            ax.barh(row, width, left=left, height=0.8, linewidth=0.4, **LOOKS[kind],
                    label=KINDS[kind] if row == 1 else None)  # fmt: skip
            left += width
    ax.set(ylim=(len(works) + 0.7, 0.3), xlim=(0, cap), yticks=range(1, len(works) + 1, 3))
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
    used = sum(work.total for work in works)
    show(fig, f"Each row shows the {cap:,} slots that one request has reserved, when it has "
              f"written {computed} tokens (a longer prompt is written in full, and a shorter "
              f"request has ended). {100 * used / (cap * len(works)):.0f} percent of all these "
              f"slots will ever be written.")  # fmt: skip


def draw_pools(runs: Mapping[str, Mapping[str, Sequence[Moment]]], slots: int) -> None:
    """Draw the memory over the steps: a row per distribution of lengths, a column per allocator."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    columns = list(next(iter(runs.values())))
    fig, axes = figure("step", "slots (%)", len(runs), len(columns), (7.4, 5.2))
    for row, (dist, found) in zip(axes, runs.items(), strict=True):
        longest = max(map(len, found.values()))
        for ax, name in zip(row, columns, strict=True):
            _stack(ax, found[name], slots)
            ax.grid(visible=False)
            ax.set(xlim=(0, longest), ylim=(0, 100), xlabel="step")
            ax.set_ylabel(f"{dist}\nslots (%)" if name == columns[0] else "")
            ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            ax.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
            ax.set_title(f"{name}: {average(found[name], 'running')} at once", fontsize=10)
    patches = [Patch(label=kind, **look) for kind, look in zip(KINDS, LOOKS, strict=True)]
    fig.legend(handles=patches, loc="outside upper center", ncols=4)
    shares = [
        [100 * float(average(found[name], "used")) / slots for found in runs.values()]
        for name in (columns[0], columns[-1])
    ]
    first, last = (f"{min(share):.0f} to {max(share):.0f} percent" for share in shares)
    show(
        fig,
        f"Simulated: the same requests and the same memory in each row. While requests waited, "
        f"{first} of the slots were written with {columns[0]}, and {last} with {columns[-1]}.",
    )


def _stack(ax: "Axes", moments: Sequence[Moment], slots: int) -> None:
    each = max(1, len(moments) // 150)
    shown = [(m.used, m.later, m.never, m.free) for m in moments[::each]]
    below = [0.0] * len(shown)
    for kind, look in enumerate(LOOKS):
        above = [low + 100 * counts[kind] / slots for low, counts in zip(below, shown, strict=True)]
        steps = [each * place for place in range(len(shown))]
        ax.fill_between(steps, below, above, linewidth=0, **look)
        below = above


def draw_tables(tables: Mapping[str, Sequence[int]], counts: Mapping[str, int], size: int) -> None:
    """Draw the block tables of some sequences, and the blocks of the memory that they name; from
    the last table an arrow leads to each of its blocks."""
    num_blocks = 1 + max(block for table in tables.values() for block in table)
    fig, ax = figure("physical block", "sequence", size=(7.8, 1.3 + 0.62 * len(tables)))
    ax.grid(visible=False)
    rows = {name: 1.5 + len(tables) - row for row, name in enumerate(tables)}
    for number, (name, table) in enumerate(tables.items()):
        for place, block in enumerate(table):
            filled = min(size, counts[name] - place * size) / size
            _cell(ax, place, rows[name], filled, f"{block}", number)
            _cell(ax, block, 0, filled, f"{name}{place}", number)
            if number == len(tables) - 1:
                ax.annotate("", (block + 0.5, 0.85), (place + 0.5, rows[name] - 0.02),
                            arrowprops={"arrowstyle": "->", "color": "#444444"})  # fmt: skip
    ax.set(xlim=(-0.05, num_blocks + 0.05), ylim=(-0.1, max(rows.values()) + 1))
    ax.set_xticks([block + 0.5 for block in range(num_blocks)], list(map(str, range(num_blocks))))
    ax.set_yticks([0.4, *(row + 0.4 for row in rows.values())], ["memory", *rows])
    name, table = list(tables.items())[-1]
    show(fig, f"Above, the block table of each sequence, with a cell for {size} positions; below, "
              f"the memory. Sequence {name} lies in the blocks {', '.join(map(str, table))}; the "
              f"white part of its last block is not written yet.")  # fmt: skip


def _cell(ax: "Axes", x: float, y: float, filled: float, text: str, number: int) -> None:
    look: dict[str, Any] = {
        "facecolor": COLOURS[(2, 5, 4)[number % 3]], "hatch": ("", "//", "..")[number % 3],
        "edgecolor": "white", "linewidth": 0,
    }  # fmt: skip
    box(ax, x, y, filled, 0.8, look)
    box(ax, x, y, 1, 0.8, {"facecolor": "none", "edgecolor": "#333333"}, text, fontsize=11,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8})  # fmt: skip


def draw_sharing(steps: Sequence[Mapping[int, Sequence[int]]]) -> None:
    """Draw which completions hold each block after each step: a row per block, a cell per step."""
    blocks = sorted(set().union(*steps))
    fig, ax = figure("step", "physical block", size=(7.5, 0.9 + 0.36 * len(blocks)))
    ax.grid(visible=False)
    for step, held in enumerate(steps, 1):
        for block, names in held.items():
            shared = len(names) > 1
            look: dict[str, Any] = {
                "facecolor": COLOURS[5] if shared else COLOURS[2], "hatch": "//" if shared else "",
                "edgecolor": "white",
            }  # fmt: skip
            box(ax, step - 0.5, block - 0.4, 1, 0.8, look, " ".join(map(str, names)), fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
    ax.set(xlim=(0.4, len(steps) + 0.6), ylim=(max(blocks) + 0.6, -0.6), yticks=blocks)
    ax.set_xticks(range(1, len(steps) + 1))
    most = max(len(names) for names in steps[0].values())
    kept = [block for block in steps[0] if len(steps[-1].get(block, ())) == most]
    show(fig, f"Simulated: a cell names the completions that hold the block, orange and hatched "
              f"where several share it. All {most} share block {', '.join(map(str, kept))} to the "
              f"end, since it is full; the partly filled block is shared for a step.")  # fmt: skip


def draw_sizes(
    sizes: Sequence[int], lengths: Sequence[int], times: Sequence[float], whole: float
) -> None:
    """Draw what a block size costs: unused slots and table entries per sequence of these lengths,
    exact, and the measured decode step beside that over one unbroken range per sequence."""
    entries = [sum(-(-length // size) for length in lengths) / len(lengths) for size in sizes]
    unused = [sum(-length % size for length in lengths) / len(lengths) for size in sizes]
    fig, (left, right) = figure(
        "slots per block (logarithmic)",
        "slots, or entries (logarithmic above 1)",
        cols=2,
        size=(7.8, 3.6),
    )
    left.plot(sizes, unused, label="slots never used", **series(0))
    left.plot(sizes, entries, label="entries of the table", **series(1))
    left.set_yscale("symlog", linthresh=1)
    left.set(ylim=(-0.2, 2 * max(entries)))
    left.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
    left.legend(loc="upper center")
    right.plot(sizes, times, label="blocks", **series(3))
    right.axhline(whole, color=COLOURS[1], linestyle="--", label="one unbroken range")
    right.set(ylim=(0, 1.15 * max(times)), ylabel="decode step (ms)")
    right.legend(loc="lower right")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, list(map(str, sizes)))
    show(
        fig,
        f"Left, computed: from blocks of {sizes[0]} to blocks of {sizes[-1]} the unused slots of a "
        f"sequence rise from {unused[0]:.1f} to {unused[-1]:.1f} and its table shrinks from "
        f"{entries[0]:.1f} entries to {entries[-1]:.1f}. Right, measured: a decode step takes "
        f"{times[0]:.1f} ms with the smallest blocks, {times[-1]:.1f} ms with the largest, and "
        f"{whole:.1f} ms with one unbroken range for each sequence.",
    )
