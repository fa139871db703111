"""Chapter 11's pictures: which program reads what, and what splitting a text buys."""

from collections.abc import Sequence
from typing import Any

from minillm_exercises.chapters.ch11 import PROCESSORS, Batch, pages_in_a_row
from minillm_exercises.chapters.ch11_traffic import Traffic
from minillm_exercises.plots import bars, bound, figure, series, show


def readers(batch: Batch, traffic: Traffic, sequence: int, head: int, page: int) -> list[Any]:
    """The programs that read the keys of one page of a sequence, for one KV head."""
    place = int(batch.tables[sequence, page]) * batch.kv_heads + head
    return traffic.readers("k", place)


def draw_grid(batch: Batch, by_token: Traffic, by_page: Traffic, programs: int) -> None:
    """Every page of every text and KV head, with the programs that read it, for two kernels; the
    second has so many `programs`."""
    fig, axes = figure("page of the text", "text and KV head", 1, 2, (9.6, 3.3))
    size, kv_heads = batch.k.shape[2], batch.kv_heads
    pages = [-(-int(length) // size) for length in batch.lengths]
    rows = [(text, head) for text in range(len(pages)) for head in range(kv_heads)]
    for y, (text, head) in enumerate(rows):
        for page in range(pages[text]):
            many = readers(batch, by_token, text, head, page)
            (one,) = readers(batch, by_page, text, head, page)
            _cell(axes[0], page, y, f"{len(many)}", 0)
            _cell(axes[1], page, y, f"{one[2]}", one[2] % 4)
    for ax, title in zip(axes, ("programs that read the page", "number of the split"), strict=True):
        ax.set_xlim(-0.7, max(pages) - 0.3)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.set_yticks(range(len(rows)), [f"text {text}, head {head}" for text, head in rows])
        ax.set_title(title, fontsize=10)
        ax.grid(visible=False)
    axes[1].set_ylabel("")
    most = max(len(readers(batch, by_token, t, h, 0)) for t, h in rows)
    busy = len({who for (name, who) in by_page.places if name == "k"})
    show(
        fig,
        f"Left, one program per query head: every page is read by {most} programs. Right, a group "
        f"at a time and split: every page is read by one, and {busy} of "
        f"{programs} programs have a page at all.",
    )


def _cell(ax: Any, x: float, y: float, text: str, kind: int) -> None:
    style = bars(kind)
    ax.bar(x, 0.84, width=0.9, bottom=y - 0.42, alpha=0.75, **style)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.9}
    ax.text(x, y, text, ha="center", va="center", fontsize=8, bbox=box)


def draw_splits(pages: int, rows: int, most: int, marked: Sequence[int]) -> None:
    """How many pages stand in a row, by the number of splits, above the bound of a full GPU."""
    fig, ax = figure("splits of one text", "pages read in a row", size=(8.2, 3.4))
    splits = range(1, most + 1)
    waited = [pages_in_a_row(pages, rows, n) for n in splits]
    ax.plot(splits, waited, **(series(0) | {"marker": "", "drawstyle": "steps-mid"}))
    limit = pages * rows / PROCESSORS
    points = [1, (most + 1) / 2, most]
    bound(ax, points, [limit] * 3, "every processor reads all the time", at=0.5)
    for n in marked:
        value, high = waited[n - 1], waited[n - 1] > 1.5 * limit
        ax.plot([n], [value], **(series(1) | {"linestyle": ""}))
        place = {"xytext": (0, 6 if high else -14), "va": "bottom" if high else "top"}
        ax.annotate(f"{n} splits: {value}", (n, value), textcoords="offset points",
                    ha="center", fontsize=9, **place)  # fmt: skip
    ax.set_yscale("log")
    ticks = [2**n for n in range(4, 12) if limit / 2 <= 2**n <= max(waited)]
    ax.set_yticks(ticks, [f"{tick}" for tick in ticks])
    ax.minorticks_off()
    ax.set_ylim(limit / 2, 1.2 * max(waited))
    told = ", ".join(f"{n} splits {waited[n - 1]}" for n in marked)
    show(
        fig,
        f"Pages that one processor of {PROCESSORS} reads one after the other, {pages} pages for "
        f"each of {rows} KV heads: {told}. The bound is {limit:.1f}.",
    )


def draw_walk(traffic: Traffic, tokens: int, heads: int, kv_heads: int) -> None:
    """The tiles of a causal prefill: queries of each program of head 0 against keys it read."""
    fig, ax = figure("position of the key", "position of the query", size=(5.6, 3.6))
    seen = 0
    for who in sorted({who for name, who in traffic.places if name == "q"}):
        rows = [place // heads for place in traffic.places["q", who] if place % heads == 0]
        keys = [place // kv_heads for place in traffic.places["k", who] if place % kv_heads == 0]
        if not rows or not keys:
            continue
        size = len(rows)
        for first in range(0, len(keys), size):
            on_edge = first + size > min(rows)
            style = bars(1 if on_edge else 0)
            ax.bar(first + size / 2, size * 0.96, width=size * 0.96,
                   bottom=min(rows) + size * 0.02, alpha=0.75, **style)  # fmt: skip
            seen += 1
    ax.set_xlim(0, tokens)
    ax.set_ylim(tokens, 0)
    ax.grid(visible=False)
    square = (tokens // size) ** 2
    show(
        fig,
        f"The tiles that the engine's prefill kernel visits for one head of {tokens} tokens: "
        f"{seen} of {square}. Only the hatched ones, on the diagonal, need a mask.",
    )
