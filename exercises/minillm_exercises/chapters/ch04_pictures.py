"""The pictures of chapter 04: shared heads, real caches, bits per byte against the cache."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from minillm_exercises.chapters.ch04_variants import Record
from minillm_exercises.plots import bars, figure, series, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_prices(found: Mapping[str, tuple[int, Fraction]]) -> None:
    """Draw a token's cache by model, and what the rule with the hidden size says."""
    fig, ax = figure("cache of one token (KiB, logarithmic)", "model", size=(8, 4.4))
    for number, (label, times) in enumerate((("kept", False), ("by hidden size", True))):
        sizes = [price * (ratio if times else 1) / 1024 for price, ratio in found.values()]
        rows = [row + 0.4 * number for row in range(len(found))]
        drawn = ax.barh(rows, [float(size) for size in sizes], 0.4, label=label, **bars(number))
        texts = [_excess(ratio) for _, ratio in found.values()] if times else []
        ax.bar_label(drawn, texts or [f"{float(s):,.4g}" for s in sizes], padding=3, fontsize=9)
    ax.set(xscale="log", yticks=[row + 0.2 for row in range(len(found))], yticklabels=list(found))
    ax.set_xlim(20, 12 * float(max(p * r for p, r in found.values())) / 1024)
    ax.invert_yaxis()
    ax.legend(loc="lower right")
    worst = max(found, key=lambda name: found[name][1])
    exact = [name for name, (_, ratio) in found.items() if ratio == 1]
    show(
        fig,
        f"Each pair of bars is one model in 16-bit values: the rule with the hidden size is right "
        f"for {' and '.join(exact)}, and {float(found[worst][1]):.1f} times too much for {worst}.",
    )


def _excess(ratio: Fraction) -> str:
    return "right" if ratio == 1 else f"{float(ratio):.3g} times too much"


def draw_quality(record: Record) -> None:
    """Draw bits per byte of every run against its cache, a panel for each held-out text."""
    texts = list(record.held_out_bytes)
    fig, axes = figure(
        "cache of a token (bytes, log; equal ones moved apart)", "bits per byte",
        cols=len(texts), size=(9.6, 4.2),
    )  # fmt: skip
    told = []
    for ax, text in zip(axes, texts, strict=True):
        ax.set(title=f"held out: {text}", xscale="log")
        told.append(f"on {text} " + ", ".join(_draw_text(ax, record, text)))
        ax.margins(0.2)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    show(
        fig,
        f"Each marker is one run and each bar the range of a variant's seeds; the axes do not "
        f"begin at zero. From the fewest bits to the most: {'; '.join(told)}.",
    )


def _draw_text(ax: "Axes", record: Record, text: str) -> list[str]:
    sizes = {run.variant: run.kv_bytes for run in record.runs}
    places = _beside(sizes)
    seeds = sorted({run.seed for run in record.runs})
    for number, seed in enumerate(seeds):
        aside = 1.03 ** (2 * number - len(seeds) + 1)  # equal results do not hide each other
        known = [(places[n] * aside, record.bits(n, text).get(seed)) for n in record.variants]
        points = [(x, y) for x, y in known if y is not None]
        look = {**series(number), "linestyle": "", "markersize": 7, "zorder": 3 + number}
        ax.plot(*zip(*points, strict=True), label=f"seed {seed}", **look)
    for run in record.controls:
        look = {**series(0), "marker": "x", "linestyle": "", "color": "black", "markersize": 9}
        ax.plot(places["mha"], run.bits[text], label="MHA without norms", **look)
    largest = record.bits(record.variants[0], text).values()
    look = {"color": "black", "linestyle": "--", "linewidth": 1.2}
    ax.axhline(sum(largest) / len(largest), label=f"mean of {record.variants[0].upper()}", **look)
    means = {}
    for name in record.variants:
        bits = list(record.bits(name, text).values())
        ax.vlines(places[name], min(bits), max(bits), color="#888888", linewidth=6, alpha=0.35)
        ax.annotate(name.upper(), (places[name], max(bits)), xytext=(0, 8), ha="center",
                    textcoords="offset points", fontsize=9)  # fmt: skip
        means[name.upper()] = sum(bits) / len(bits)
    for run in record.controls:
        means["MHA without norms"] = run.bits[text]
    ax.set_xticks(sorted(set(sizes.values())), [f"{n:,}" for n in sorted(set(sizes.values()))])
    ax.minorticks_off()
    return sorted(means, key=means.__getitem__)


def _beside(sizes: Mapping[str, int]) -> dict[str, float]:
    """A place on a logarithmic axis for each; those of one size stand around it."""
    places = {}
    for name, size in sizes.items():
        equal = [other for other in sizes if sizes[other] == size]
        places[name] = size * 1.35 ** (equal.index(name) - (len(equal) - 1) / 2)
    return places


def draw_live(found: Mapping[str, tuple[int, float]], base: str) -> None:
    """Draw bits per byte against the cache as computed here: by name, bytes and bits per byte."""
    fig, ax = figure("bits per byte", "model", size=(8, 3.6))
    names = [f"{name}, {size:,} bytes a token" for name, (size, _) in found.items()]
    looks = [bars(int("averaged" in name)) for name in found]
    for row, (label, (_, bits)) in enumerate(zip(names, found.values(), strict=True)):
        drawn = ax.barh(label, bits, **looks[row])
        ax.bar_label(drawn, [f"{bits:.3f}"], padding=3)
    ax.axvline(found[base][1], color="black", linestyle="--", linewidth=1.2)
    ax.set_xlim(0, 1.15 * max(bits for _, bits in found.values()))
    ax.invert_yaxis()
    told = ", ".join(f"{name} {bits:.3f}" for name, (_, bits) in found.items())
    show(fig, f"Bits per byte on a text that no model has read, dashed the trained {base}: {told}.")


def draw_sharing(query_heads: int, kv_heads: Sequence[int]) -> None:
    """Draw which query heads read which key and value head, a panel for each number of them, and
    MLA in the last panel."""
    names = [_sharing_name(query_heads, count) for count in kv_heads]
    fig, axes = figure("-", "-", cols=len(names) + 1, size=(11, 3.1))
    for ax, name, count in zip(axes, [*names, "MLA"], [*kv_heads, query_heads], strict=True):
        ax.set_axis_off()
        ax.set(xlim=(-0.7, query_heads - 0.3), ylim=(-1.15, 2.5), title=name)
        group = query_heads // count
        for head in range(query_heads):
            middle = head // group * group + (group - 1) / 2
            _mark(ax, head, 2, "o", f"q{head}")
            ax.plot((head, middle), (1.75, 1.25), color="black", linewidth=1)
        for number in range(count):
            middle = number * group + (group - 1) / 2
            _mark(ax, middle, 1, "s", f"k{number}", made=name == "MLA")
        if name == "MLA":
            middle = (query_heads - 1) / 2
            _mark(ax, middle, -0.4, "s", "c")
            for head in range(query_heads):
                ax.plot((head, middle), (0.75, -0.15), color="black", linewidth=1, linestyle=":")
        kept = (
            "1 latent, 1 rotated key"
            if name == "MLA"
            else f"{count} head{'s' * (count > 1)} of K and V"
        )
        ax.text((query_heads - 1) / 2, -1.05, f"kept: {kept}", ha="center", fontsize=9)
    show(
        fig,
        f"Lines lead from the {query_heads} query heads q to the key and value head k that each "
        f"reads; filled squares are kept in the cache. With MLA one latent c is kept, and each "
        f"head's key and value can be made from it; one more key, which is rotated, is not drawn.",
    )


def _sharing_name(query_heads: int, kv_heads: int) -> str:
    return {query_heads: "MHA", 1: "MQA"}.get(kv_heads, "GQA")


def _mark(ax: "Axes", x: float, y: float, marker: str, text: str, made: bool = False) -> None:
    """A head: a circle for a query, a square for what is kept, a dashed square for what is made."""
    filled = marker == "s" and not made
    ax.scatter([x], [y], marker=marker, s=330, facecolor="#56B4E9" if filled else "white",
               edgecolor="black", linestyle="--" if made else "-", zorder=3)  # fmt: skip
    ax.text(x, y, text, ha="center", va="center", fontsize=8, zorder=4)
