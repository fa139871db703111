"""The pictures of chapter 04: shared heads, real caches, bits per byte against the cache."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from minillm_exercises.chapters.ch04_variants import Record
from minillm_exercises.plots import figure, note, series, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_prices(found: Mapping[str, tuple[int, Fraction]]) -> None:
    """Draw a token's cache by model, and what the rule with the hidden size says."""
    fig, ax = figure("cache of one token (KiB, logarithmic)", "model", size=(8, 3.8))
    kept = [float(price) / 1024 for price, _ in found.values()]
    said = [float(price * ratio) / 1024 for price, ratio in found.values()]
    rows = range(len(found))
    ax.hlines(rows, kept, said, color="#888888", linewidth=1.5)
    for number, (label, sizes) in enumerate((("kept", kept), ("by hidden size", said))):
        look = series(number) | {"linestyle": "none", "markersize": (11, 7)[number]}
        ax.plot(sizes, rows, label=label, **look | {"fillstyle": ("none", "full")[number]})
    for row, (size, (_, ratio)) in enumerate(zip(said, found.values(), strict=True)):
        texts = (f"{kept[row]:,.4g}", -12, "right"), (_excess(ratio), 10, "left")
        for (text, aside, side), x in zip(texts, (kept[row], size), strict=True):
            note(ax, text, (x, row), (aside, 0), ha=side, va="center")
    ax.set(xscale="log", yticks=rows, yticklabels=list(found))
    ax.set_xlim(min(kept) / 2, 12 * max(said))
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.invert_yaxis()
    ax.legend(loc="upper right")
    worst = max(found, key=lambda name: found[name][1])
    exact = [name for name, (_, ratio) in found.items() if ratio == 1]
    show(
        fig,
        f"Each row is one model in 16-bit values: the rule with the hidden size is right for "
        f"{' and '.join(exact)}, and {float(found[worst][1]):.1f} times too much for {worst}.",
    )


def _excess(ratio: Fraction) -> str:
    return "right" if ratio == 1 else f"{float(ratio):.3g} times too much"


def draw_quality(record: Record) -> None:
    """Draw bits per byte of every run, a row for each variant and a panel for each held-out
    text."""
    texts = list(record.held_out_bytes)
    fig, axes = figure("bits per byte", "variant", cols=len(texts), size=(9.6, 3.6))
    told = []
    axes[-1].sharex(axes[0])
    for ax, text in zip(axes, texts, strict=True):
        ax.set(title=f"held out: {text}")
        means = _draw_text(ax, record, text)
        base, *others = record.variants
        more = [f"{name.upper()} {means[name] - means[base]:+.2f}" for name in others]
        told.append(f"on {text} {', '.join(more)}")
    axes[-1].set_ylabel("")
    axes[-1].set_yticklabels([])
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    show(
        fig,
        f"Each marker is one run (the cross: without norms of queries and keys), and the axes do "
        f"not begin at zero; bits per byte beyond the mean of {record.variants[0].upper()}: "
        f"{'; '.join(told)}.",
    )


def _draw_text(ax: "Axes", record: Record, text: str) -> dict[str, float]:
    """Draw the runs on one text; returns the mean of each variant."""
    sizes = {run.variant: run.kv_bytes for run in record.runs}
    rows = {name: row for row, name in enumerate(record.variants)}
    for number, seed in enumerate(sorted({run.seed for run in record.runs})):
        known = [(record.bits(n, text).get(seed), rows[n]) for n in record.variants]
        points = [(x, y) for x, y in known if x is not None]
        look = {**series(number), "linestyle": "", "markersize": 9, "fillstyle": "none"}
        ax.plot(*zip(*points, strict=True), label=f"seed {seed}", markeredgewidth=1.8, **look)
    for run in record.controls:
        look = {"marker": "x", "linestyle": "", "color": "black", "markersize": 9}
        ax.plot(run.bits[text], rows["mha"], label="MHA without norms", **look)
    bits = {name: list(record.bits(name, text).values()) for name in record.variants}
    means = {name: sum(found) / len(found) for name, found in bits.items()}
    first = record.variants[0]
    ax.axvline(means[first], label=f"mean of {first.upper()}", color="black", linestyle="--",
               linewidth=1.2)  # fmt: skip
    labels = [f"{name.upper()}, {sizes[name]:,} bytes a token" for name in record.variants]
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    return means


def draw_sharing(query_heads: int, kv_heads: Sequence[int]) -> None:
    """Draw which query heads read which key and value head, a panel for each number of them."""
    names = [_sharing_name(query_heads, count) for count in kv_heads]
    fig, axes = figure("-", "-", cols=len(names), size=(9, 2.4))
    for ax, name, count in zip(axes, names, kv_heads, strict=True):
        _draw_heads(ax, query_heads, count, name, bottom=0.2)
        kept = f"kept: {count} head{'s' * (count > 1)} of K and V"
        ax.text((query_heads - 1) / 2, 0.3, kept, ha="center", fontsize=9)
    show(
        fig,
        f"Lines lead from the {query_heads} query heads q to the key and value head kv that each "
        f"reads; filled squares are kept in the cache.",
    )


def draw_latent(query_heads: int) -> None:
    """Draw what MLA keeps, and what each head's key and value are made from."""
    fig, ax = figure("-", "-", size=(5.6, 3.1))
    _draw_heads(ax, query_heads, query_heads, "MLA", bottom=-1.15, made=True)
    middle = (query_heads - 1) / 2
    _mark(ax, middle - 1, -0.4, "s", "c")
    _mark(ax, middle + 1, -0.4, "s", "kr")
    for head in range(query_heads):
        ax.plot((head, middle - 1), (0.75, -0.15), color="black", linewidth=1, linestyle=":")
    ax.text(middle, -1.1, "kept: a latent c and a rotated key kr", ha="center", fontsize=9)
    show(
        fig,
        "With MLA one latent c is kept, from which each head's key and value can be made (dashed "
        "squares), and one rotated key kr, which all heads share.",
    )


def _draw_heads(ax: "Axes", queries: int, count: int, name: str, bottom: float, made: bool = False
                ) -> None:  # fmt: skip
    """Query heads above the key and value heads that they read."""
    ax.set_axis_off()
    ax.set(xlim=(-0.7, queries - 0.3), ylim=(bottom, 2.5), title=name)
    group = queries // count
    for head in range(queries):
        middle = head // group * group + (group - 1) / 2
        _mark(ax, head, 2, "o", f"q{head}")
        ax.plot((head, middle), (1.75, 1.25), color="black", linewidth=1)
    for number in range(count):
        _mark(ax, number * group + (group - 1) / 2, 1, "s", f"kv{number}", made=made)


def _sharing_name(query_heads: int, kv_heads: int) -> str:
    return {query_heads: "MHA", 1: "MQA"}.get(kv_heads, "GQA")


def _mark(ax: "Axes", x: float, y: float, marker: str, text: str, made: bool = False) -> None:
    """A head: a circle for a query, a square for what is kept, a dashed square for what is made."""
    filled = marker == "s" and not made
    ax.scatter([x], [y], marker=marker, s=330, facecolor="#56B4E9" if filled else "white",
               edgecolor="black", linestyle="--" if made else "-", zorder=3)  # fmt: skip
    ax.text(x, y, text, ha="center", va="center", fontsize=8, zorder=4)
