"""The pictures of chapter 14: two weights in their plane, inputs, and what calibration buys."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minillm_exercises.plots import COLOURS, bars, bound, figure, series, show


def draw_plane(weight: Tensor, inputs: Tensor) -> None:
    """Draw two weights, the grid points around them, and curves of equal output error."""
    fig, ax = figure("first weight", "second weight", size=(6.6, 3.4))
    a = torch.linspace(-0.3, 2.7, 240)
    b = torch.linspace(-1.3, 2.3, 240)
    plane = torch.stack(torch.meshgrid(a, b, indexing="xy"), -1) - weight
    errors = (plane @ inputs.T).square().sum(-1)
    points = torch.cartesian_prod(torch.arange(0.0, 3.0), torch.arange(-1.0, 3.0))
    apart = points - weight
    outputs = (apart @ inputs.T).square().sum(-1)
    near = points[apart.square().sum(-1).argmin()]
    best = points[outputs.argmin()]
    levels = [0.25 * float(outputs.min()), float(outputs.min()), 4 * float(outputs.min()), 16.0]
    ax.contour(a.numpy(), b.numpy(), errors.numpy(), levels=sorted(set(levels)),
               colors="#888888", linewidths=1.0)  # fmt: skip
    ax.plot(points[:, 0], points[:, 1], "k+", markersize=9, label="grid")
    ax.plot(*weight.tolist(), **{**series(0), "linestyle": ""}, label="the weights")
    for place, (point, name) in enumerate(((near, "nearest"), (best, "smallest output error"))):
        look = {**series(1 + 2 * place), "linestyle": "", "markersize": 9, "fillstyle": "none"}
        ax.plot(*point.tolist(), **look, label=name)
    fig.legend(loc="outside right upper")
    one, other = ([f"{each:g}" for each in point.tolist()] for point in (near, best))
    show(
        fig,
        "Two weights and the points of their grid. On a grey curve the output error is the same. "
        f"The nearest point is ({', '.join(one)}); the point ({', '.join(other)}) is farther away "
        "and lies on an inner curve.",
    )


def draw_correlation(inputs: Mapping[str, Tensor], channels: int) -> None:
    """Draw how the first inputs of matrices go together, a panel for each of them."""
    fig, axes = figure("channel", "channel", cols=len(inputs), size=(8.2, 3.2))
    told = []
    for ax, (name, matrix) in zip(axes, inputs.items(), strict=True):
        part = matrix[:channels, :channels]
        image = ax.imshow(part.numpy(), vmin=-1, vmax=1, cmap="PuOr")
        ax.set_title(name)
        ax.grid(visible=False)
        beside = (part - torch.eye(len(part))).abs().sum() / (len(part) * (len(part) - 1))
        told.append(f"{float(beside):.2f} in {name}")
    fig.colorbar(image, ax=list(axes), label="correlation")
    show(
        fig,
        f"The first {channels} inputs of two matrices, each with each other: dark cells are pairs "
        f"that are large together, or large with opposite signs. Two different inputs have a "
        f"correlation of {' and '.join(told)}, up to signs and on average.",
    )


def draw_tokens(
    kl: Mapping[int, float], without: float, errors: Mapping[str, Mapping[int, float]],
    plain: float,
) -> None:  # fmt: skip
    """Draw KL against calibration tokens, and the output error on both texts."""
    fig, (left, right) = figure("calibration tokens (logarithmic)", "KL (nats per token)", cols=2,
                                size=(8.6, 3.2))  # fmt: skip
    tokens = list(kl)
    left.plot(tokens, list(kl.values()), label="GPTQ", **series(0))
    bound(left, tokens, [without] * len(tokens), "rounding to nearest, no text", "above", 1.0)
    left.set_ylim(0, 1.3 * max(kl.values()))
    left.legend(loc="lower left")
    right.set_ylabel("squared output error (%)")
    for place, (name, values) in enumerate(errors.items()):
        right.plot(tokens, [100 * each for each in values.values()], label=name, **series(place))
    bound(right, tokens, [100 * plain] * len(tokens), "rounding to nearest", at=1.0)
    right.legend(loc="center left", bbox_to_anchor=(0.0, 0.38))
    right.set_ylim(bottom=0)
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(tokens, [f"{each:,}" for each in tokens])
    few, many = tokens[0], tokens[-1]
    show(
        fig,
        f"GPTQ against the text it saw. With {few:,} tokens its KL is {kl[few] / without:.2f} "
        f"times that of rounding to nearest, with {many:,} it is {kl[many] / without:.2f} times. "
        f"Right: with few tokens the error is small on these tokens only.",
    )


def draw_channels(channels: Mapping[str, Tensor], what: str) -> None:
    """Draw a number of every channel, largest first."""
    fig, ax = figure("channel, largest first", f"{what} (logarithmic)", size=(6.4, 3.0))
    told = []
    for place, (name, values) in enumerate(channels.items()):
        ordered = values.sort(descending=True).values
        look = {**series(place), "markevery": [0, 1, 2, 3, len(ordered) - 1]}
        ax.plot(range(len(ordered)), ordered.tolist(), label=name, **look)
        told.append(f"{float(ordered[0] / ordered.mean()):.0f} times the mean in {name}")
    ax.set_yscale("log")
    ax.legend(loc="upper right")
    show(
        fig,
        f"The {what} of the inputs of a matrix, channel by channel. The largest channel has "
        f"{', '.join(told)}.",
    )


def draw_methods(kl: Mapping[str, Mapping[str, float]], what: str) -> None:
    """Draw KL by method, a group of bars for each model."""
    models = list(next(iter(kl.values())))
    fig, ax = figure("model", f"KL of {what} (nats per token)", size=(6.6, 3.2))
    width = 0.8 / len(kl)
    for place, (method, values) in enumerate(kl.items()):
        at = [number + place * width for number in range(len(models))]
        ax.bar(at, list(values.values()), width, label=method, **bars(place))
        for x, value in zip(at, values.values(), strict=True):
            ax.text(x, value, f"{value:.2g}", ha="center", va="bottom", fontsize=9)
    ax.set_xticks([number + 0.4 - width / 2 for number in range(len(models))], models)
    ax.grid(visible=False, axis="x")
    fig.legend(loc="outside right upper")
    first, last = models[0], models[-1]
    best = {model: min(kl, key=lambda method: kl[method][model]) for model in models}
    worst = max(kl, key=lambda method: kl[method][last] / kl[method][first])
    show(
        fig,
        f"KL of {what}, smaller is better: the smallest is that of {best[first]} on {first}, and "
        f"of {best[last]} on {last}. From {first} to {last} it rises most with {worst}, "
        f"{kl[worst][last] / kl[worst][first]:.1f} times.",
    )


def draw_rounded(kl: Mapping[str, Mapping[str, float]]) -> None:
    """Draw KL with int8 weights and int8 inputs by method, logarithmic."""
    models: Sequence[str] = list(next(iter(kl.values())))
    fig, ax = figure("KL (nats per token, logarithmic)", "inputs", size=(7.2, 3.0))
    for row, values in enumerate(kl.values()):
        for place, model in enumerate(models):
            look = {**series(place), "linestyle": "", "markersize": 7 + 4 * place}
            look["fillstyle"] = "none" if place else "full"
            ax.plot([values[model]], [row], label=model if row == 0 else None, **look)
        ax.plot(list(values.values()), [row] * len(models), color=COLOURS[2], zorder=0)
    ax.set_xscale("log")
    ax.set_yticks(range(len(kl)), list(kl))
    ax.invert_yaxis()
    fig.legend(loc="outside upper right", ncols=2)
    worst = max(kl, key=lambda name: kl[name][models[-1]])
    show(
        fig,
        f"KL with int8 weights and int8 inputs. The planted channels matter most for '{worst}': "
        f"{kl[worst][models[0]]:.2g} becomes {kl[worst][models[-1]]:.2g}.",
    )
