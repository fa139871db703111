"""The pictures of chapter 04: real caches, the forms of MLA, bits per byte against the cache."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from minillm.config import ModelConfig
from minillm.plan.cost import step_cost
from minillm_exercises.chapters.ch04 import crossing, forms
from minillm_exercises.chapters.ch04_variants import Record
from minillm_exercises.plots import bars, bound, figure, series, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIGA, TERA = 10**9, 10**12


def draw_prices(found: Mapping[str, tuple[int, Fraction]]) -> None:
    """Draw a token's cache by model, and what the rule with the hidden size says."""
    fig, ax = figure("cache of one token (KiB, logarithmic)", "model", size=(8, 4.4))
    for number, (label, times) in enumerate((("kept", False), ("by hidden size", True))):
        sizes = [price * (ratio if times else 1) / 1024 for price, ratio in found.values()]
        rows = [row + 0.4 * number for row in range(len(found))]
        drawn = ax.barh(rows, [float(size) for size in sizes], 0.4, label=label, **bars(number))
        texts = [f"{float(r):.3g} times" for _, r in found.values()] if times else []
        ax.bar_label(drawn, texts or [f"{float(s):,.4g}" for s in sizes], padding=3, fontsize=9)
    ax.set(xscale="log", yticks=[row + 0.2 for row in range(len(found))], yticklabels=list(found))
    ax.set_xlim(20, 4 * float(max(p * r for p, r in found.values())) / 1024)
    ax.invert_yaxis()
    ax.legend(loc="lower right")
    worst = max(found, key=lambda name: found[name][1])
    exact = [name for name, (_, ratio) in found.items() if ratio == 1]
    show(
        fig,
        f"Each pair of bars is one model in 16-bit values: the rule with the hidden size is right "
        f"for {' and '.join(exact)}, and {float(found[worst][1]):.1f} times too much for {worst}.",
    )


def draw_forms(config: ModelConfig, name: str, contexts: Sequence[int]) -> None:
    """Draw operations and bytes of a decode step by context, and from how many new tokens on
    absorbing costs more than expanding."""
    fig, (left, middle, right) = figure(
        "tokens in the context", "operations of a step (10^12)", cols=3, size=(11.5, 4)
    )
    steps = [forms(config, 1, seq) for seq in contexts]
    for number, form in enumerate(steps[0]):
        work = [step[form].operations / TERA for step in steps]
        moved = [step[form].num_bytes / GIGA for step in steps]
        left.plot(contexts, work, label=form, **series(number))
        middle.plot(contexts, moved, **series(number))
    rest = step_cost(config, [1], [1])
    bound(left, contexts, [rest.linear_flops / TERA] * len(contexts), "products with weights")
    weights = [rest.weight_bytes / GIGA] * len(contexts)
    bound(middle, contexts, weights, "all weights of the step")
    left.set(xscale="log", yscale="log", title="one new token: operations")
    left.set_ylim(rest.linear_flops / TERA / 10)
    middle.set(xscale="log", yscale="log", title="one new token: bytes")
    middle.set_ylabel("bytes moved in a step (10^9)")
    fig.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=3)
    meets = _draw_crossings(right, config, contexts)
    expand, absorb = (steps[0][f"keep latents, {way}"] for way in ("expand", "absorb"))
    show(
        fig,
        f"{name}: with one new token behind {contexts[0]:,} expanding takes "
        f"{expand.operations / absorb.operations:.0f} times the operations and moves "
        f"{expand.num_bytes / absorb.num_bytes:.0f} times the bytes of absorbing; right, below the "
        f"dashed line expanding takes fewer, from {meets[0]} new tokens on in the shortest of "
        f"these contexts and from {meets[-1]} in the longest.",
    )


def _draw_crossings(ax: "Axes", config: ModelConfig, contexts: Sequence[int]) -> list[int]:
    new = [2**power for power in range(13)]
    for number, seq in enumerate((contexts[0], contexts[-1])):
        ratio = [_ratio(config, queries, seq) for queries in new]
        ax.plot(new, ratio, label=f"context {seq:,}", **series(number))
    ax.plot(new, [_ratio(config, n, n) for n in new], label="whole prompts", **series(2))
    bound(ax, new, [1] * len(new), "equal", side="above", at=1.0)
    ax.set(xscale="log", yscale="log", xlabel="new tokens in the step")
    ax.set(ylabel="expanding / absorbing (times)", title="more new tokens: operations")
    ax.legend(loc="upper right")
    return [crossing(config, seq) for seq in contexts]


def _ratio(config: ModelConfig, queries: int, seq: int) -> float:
    found = forms(config, queries, seq)
    return found["keep latents, expand"].operations / found["keep latents, absorb"].operations


def draw_quality(record: Record) -> None:
    """Draw bits per byte of every run against its cache, a panel for each held-out text."""
    texts = list(record.held_out_bytes)
    fig, axes = figure("cache of a token (bytes, logarithmic)", "bits per byte", cols=len(texts),
                       size=(9.6, 4.2))  # fmt: skip
    told = []
    for ax, text in zip(axes, texts, strict=True):
        ax.set(title=f"held out: {text}", xscale="log")
        told.append(f"on {text} " + ", ".join(_draw_text(ax, record, text)))
        ax.margins(0.2)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    show(
        fig,
        f"Each marker is one run and each bar the range of a variant's seeds; the axes do not "
        f"begin at zero; {'; '.join(told)}.",
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
    told = []
    for name in record.variants:
        bits = list(record.bits(name, text).values())
        ax.vlines(places[name], min(bits), max(bits), color="#888888", linewidth=6, alpha=0.35)
        ax.annotate(name.upper(), (places[name], max(bits)), xytext=(0, 8), ha="center",
                    textcoords="offset points", fontsize=9)  # fmt: skip
        told.append(f"{name.upper()} {min(bits):.3f} to {max(bits):.3f}")
    told += [f"MHA without norms {run.bits[text]:.3f}" for run in record.controls]
    ax.set_xticks(sorted(set(sizes.values())), [f"{n:,}" for n in sorted(set(sizes.values()))])
    ax.minorticks_off()
    return told


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
