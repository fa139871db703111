"""The pictures of chapter 15: what is cached, formats, requests of a pool, and time by context."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from minillm_exercises.chapters.ch15 import Kind
from minillm_exercises.plots import COLOURS, bound, figure, series, show


def draw_stripes(key: Tensor, value: Tensor) -> None:
    """Draw |x| of the keys and values [positions, D] of one head, each in a panel."""
    fig, axes = figure("dimension of the head", "position", cols=2, size=(8.4, 3.0))
    told = []
    for ax, (name, x) in zip(axes, {"keys": key, "values": value}.items(), strict=True):
        sizes = x.abs()
        image = ax.imshow((sizes / sizes.max()).numpy(), aspect="auto", cmap="Greys", vmin=0)
        ax.set_title(name)
        ax.grid(visible=False)
        channels = sizes.amax(0)
        told.append(f"{float(channels.max() / channels.median()):.1f} times in the {name}")
    fig.colorbar(image, ax=list(axes), label="|x| / largest")
    show(
        fig,
        f"One head of tiny over {len(key)} positions; dark is large. Vertical stripes are "
        "dimensions that are large at every position: the largest dimension reaches "
        f"{' and '.join(told)} as far as the middle one.",
    )


def draw_channels(channels: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw the largest |x| of each channel, largest first, over the middle one; a panel for each
    model."""
    fig, axes = figure("channel, largest first", "largest |x| over the middle channel's",
                       cols=len(channels), size=(8.6, 3.0))  # fmt: skip
    told = []
    for ax, (model, found) in zip(axes, channels.items(), strict=True):
        for place, (name, values) in enumerate(found.items()):
            shares = [each / values[len(values) // 2] for each in values]
            look = {**series(place), "markevery": max(1, len(shares) // 8)}
            ax.plot(range(len(shares)), shares, label=name, **look)
            told.append(f"{shares[0]:.1f} for {name} of {model}")
        ax.set(title=model, ylim=(0, None))
        ax.legend(loc="upper right")
    show(
        fig,
        "The largest |x| of every channel of one layer, divided by that of the middle channel. "
        f"The largest is {', '.join(told)}.",
    )


def draw_formats(kinds: Sequence[Kind], kl: Mapping[str, Mapping[str, float]]) -> None:
    """Draw the KL of each kind, a mark for each model."""
    fig, ax = figure("KL (nats per token, logarithmic)", "format, bits for a number",
                     size=(8.2, 4.0))  # fmt: skip
    for place, (model, values) in enumerate(kl.items()):
        look = {**series(place), "linestyle": "", "markersize": 8}
        ax.plot([values[kind.name] for kind in kinds], range(len(kinds)), label=model, **look)
    for row, kind in enumerate(kinds):
        ends = [values[kind.name] for values in kl.values()]
        ax.plot(ends, [row] * len(ends), color=COLOURS[2], zorder=0)
    ax.set_xscale("log")
    ax.set_yticks(range(len(kinds)), [f"{kind.name}, {kind.bits:.4g}" for kind in kinds])
    ax.invert_yaxis()
    fig.legend(loc="outside upper right", ncols=2)
    *_, last = kl
    best, worst = (pick(kl[last], key=kl[last].__getitem__) for pick in (min, max))
    show(
        fig,
        f"How far a model is from itself after its cache was rounded; left is better. On {last} "
        f"the smallest KL is that of '{best}', the largest that of '{worst}', "
        f"{kl[last][worst] / kl[last][best]:.0f} times as large.",
    )


def draw_pool(runs: Mapping[str, Sequence[int]]) -> None:
    """Draw how many requests run in each step, a line for each kind of cache."""
    fig, ax = figure("step", "requests that run", size=(7.4, 2.8))
    for place, (name, counts) in enumerate(runs.items()):
        look = {**series(place), "marker": ""}
        ax.step(range(len(counts)), counts, where="post", label=name, **look)
    ax.set_ylim(bottom=0)
    fig.legend(loc="outside right upper")
    told = " and ".join(
        f"{max(counts)} with {name}, in {len(counts):,} steps" for name, counts in runs.items()
    )
    show(
        fig,
        f"Simulated with the engine's scheduler: the same requests and the same bytes of cache. "
        f"At most {told} run together.",
    )


def draw_contexts(
    contexts: Sequence[int], seconds: Mapping[str, Sequence[float]],
    floors: Mapping[str, Sequence[float]], most: float,
) -> None:  # fmt: skip
    """Draw the time of a token's attention against its context above its bounds, and the gain."""
    fig, (left, right) = figure("context (tokens, logarithmic)", "time of attention (µs)", cols=2,
                                size=(8.8, 3.4))  # fmt: skip
    for place, (name, times) in enumerate(seconds.items()):
        left.plot(contexts, [1e6 * each for each in times], label=name, **series(place))
        left.plot(contexts, [1e6 * each for each in floors[name]], color="black", linewidth=1.2,
                  linestyle="--", label=None if place else "bounds: bytes / bandwidth")  # fmt: skip
    first, second = seconds.values()
    gains = [one / other for one, other in zip(first, second, strict=True)]
    right.plot(contexts, gains, **series(1))
    bound(right, contexts, [most] * len(contexts), "bytes of 16 bits / bytes of 8", "above", 0.5)
    right.axhline(1, color="black", linewidth=1)
    right.set_ylabel("times as fast with 8 bits")
    right.set_ylim(0, 1.25 * max(most, *gains))
    left.set_yscale("log")
    left.legend(loc="upper left")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(contexts[::2], [f"{each:,}" for each in contexts[::2]])
    show(
        fig,
        f"Measured: attention of one token in one layer. With {contexts[0]:,} tokens of context "
        f"8 bits are {gains[0]:.2f} times as fast as 16, with {contexts[-1]:,} "
        f"{gains[-1]:.2f} times.",
    )
