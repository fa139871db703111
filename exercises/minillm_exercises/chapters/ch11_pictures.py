"""Chapter 11's pictures: which program reads what, and what splitting a text buys."""

from collections.abc import Sequence
from typing import Any

from minillm_exercises.chapters.ch11 import PROCESSORS, Batch, pages_in_a_row
from minillm_exercises.chapters.ch11_traffic import Traffic
from minillm_exercises.plots import bars, bound, figure, note, series, show


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


def _cell(ax: Any, x: float, y: float, text: str, kind: int | None) -> None:
    """A box with a text, in the colour of a kind or white."""
    style = {"color": "white", "edgecolor": "#999999"} if kind is None else bars(kind)
    ax.bar(x, 0.84, width=0.9, bottom=y - 0.42, alpha=0.75, **style)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.9}
    ax.text(x, y, text, ha="center", va="center", fontsize=8, bbox=box)


def draw_addresses(rows: int, width: int, row: int, tile: int) -> None:
    """One row's tile in a matrix, and the same tile in memory, where rows stand one behind the
    other; a tile is wider than a row, and its last places are masked."""
    fig, axes = figure("column", "row", 2, 1, (8.6, 3.9))
    first, total = row * width, rows * width
    inside, masked = range(first, first + width), range(first + width, first + tile)
    for place in range(total):
        kind = 0 if place in inside else None
        _cell(axes[0], place % width, place // width, f"{place}", kind)
    for place in masked:
        _cell(axes[0], place - first, row, f"{place}", 1)
    for place in range(total):
        kind = 0 if place in inside else 1 if place in masked else None
        _cell(axes[1], place, 0, f"{place}", kind)
    axes[0].set_xlim(-0.6, max(tile, 2 * width) - 0.4)
    axes[0].set_ylim(rows - 0.4, -0.6)
    axes[0].set_xticks(range(tile))
    axes[0].set_yticks(range(rows))
    axes[0].text(tile, row, f"  tile of program {row}: {width} places\n  of its row, "
                 f"{tile - width} masked", va="center", fontsize=9)  # fmt: skip
    axes[1].set_xlim(-0.6, total - 0.4)
    axes[1].set_ylim(1.1, -1.1)
    axes[1].set_xticks([k * width for k in range(rows)], [f"row {k}" for k in range(rows)])
    axes[1].set_yticks([])
    axes[1].set_ylabel("")
    axes[1].set_xlabel("place in memory")
    for ax in axes:
        ax.grid(visible=False)
    show(
        fig,
        f"Above, a matrix of {rows} rows and {width} columns, each cell with its address. Below, "
        f"the same addresses in memory. The tile of program {row} has {tile} places: {width} lie "
        f"in its row, and the hatched {tile - width} belong to the next row, so they are masked.",
    )


def draw_page(page: int, heads: int, head: int, slots: int, width: int, filled: int) -> None:
    """The tile of addresses of one page: a column of slots plus a row of numbers, and where the
    tile lies in memory; only the first `filled` slots hold a key."""
    from matplotlib.patches import Rectangle

    fig, axes = figure("place in the key", "slot of the page", 1, 3, (8.6, 2.9))
    rows, start = range(slots), (page * heads + head) * slots
    for slot in rows:
        kind = 0 if slot < filled else 1
        _cell(axes[0], 0, slot, f"{(start + slot) * width}", kind)
        for place in range(width):
            _cell(axes[2], place, slot, f"{(start + slot) * width + place}", kind)
    for place in range(width):
        _cell(axes[1], place, 0, f"{place}", None)
    titles = ("(base + slots)[:, None] * D", "+  dims", "=  at, the tile of addresses")
    for ax, title, columns in zip(axes, titles, (1, width, width), strict=True):
        ax.set(xlim=(-0.7, max(columns, 2) - 0.3), ylim=(slots - 0.4, -0.6), title=title)
        ax.set_xticks(range(columns))
        ax.set_yticks(rows if ax is not axes[1] else [])
        ax.grid(visible=False)
        ax.title.set_fontsize(10)
    for ax in axes[1:]:
        ax.set_ylabel("")
    axes[0].set(xlabel="one column", xticks=[])
    axes[2].add_patch(Rectangle((-0.5, -0.5), width, slots, fill=False, linewidth=1.5))
    show(
        fig,
        f"Page {page} of KV head {head}, with {slots} slots of {width} numbers: its first slot is "
        f"slot {start} of the cache. A column plus a row is a table, and each cell is their sum. "
        "Hatched slots lie behind the end of the text and are masked.",
    )


def draw_splits(pages: int, rows: int, most: int, marked: Sequence[int]) -> None:
    """How many pages stand in a row, by the number of splits, above the bound of a full GPU."""
    fig, ax = figure("splits of one text", "pages read in a row (logarithmic)", size=(8.2, 3.8))
    splits = range(1, most + 1)
    waited = [pages_in_a_row(pages, rows, n) for n in splits]
    ax.plot(splits, waited, **(series(0) | {"marker": "", "drawstyle": "steps-mid"}))
    limit = pages * rows / PROCESSORS
    bound(ax, [1, most / 2, most], [limit] * 3, f"bound: all {PROCESSORS} processors read, "
          f"{limit:.0f} pages each", at=1.0)  # fmt: skip
    for n in marked:
        value = waited[n - 1]
        ax.plot([n], [value], **(series(1) | {"linestyle": ""}))
        high = value > 1.2 * limit or 2 * n > most  # the first low point has its label below
        note(ax, f"{n} splits: {value}", (n, value), (0, 34 if high else -34), ha="center",
             arrowprops={"arrowstyle": "-", "color": "#777777"})  # fmt: skip
    ax.set_yscale("log")
    ticks = [2**n for n in range(4, 12) if limit / 2 <= 2**n <= max(waited)]
    ax.set_yticks(ticks, [f"{tick}" for tick in ticks])
    ax.minorticks_off()
    ax.set_ylim(limit / 2, 1.2 * max(waited))
    found = ", ".join(f"{n} splits {waited[n - 1]}" for n in marked)
    show(
        fig,
        f"Simulated: pages that one processor of {PROCESSORS} reads one after the other, {pages} "
        f"pages for each of {rows} KV heads: {found}. The bound is {limit:.1f}.",
    )
