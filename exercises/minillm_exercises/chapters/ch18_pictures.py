"""The pictures of chapter 18: dispatch and combine, experts that are read, steps, and loads."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minillm.config import ModelConfig
from minillm.lab.hardware import Hardware
from minillm.plan.parameters import expected_distinct
from minillm_exercises.chapters import ch18
from minillm_exercises.plots import bound, figure, series, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

LOOKS: tuple[dict[str, Any], ...] = (
    {"facecolor": "#9ecae1", "edgecolor": "black"},
    {"facecolor": "#fdd49e", "edgecolor": "black", "hatch": "//"},
    {"facecolor": "#c7e9c0", "edgecolor": "black", "hatch": ".."},
)
IDLE: dict[str, Any] = {"facecolor": "white", "edgecolor": "#999999", "linestyle": "--"}


def _box(ax: "Axes", left: float, top: float, width: float, text: str, **look: Any) -> None:
    """A box of height 1 with a text in it."""
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((left, top), width, 1, **look))
    plain = {"boxstyle": "square,pad=0.15", "facecolor": look["facecolor"], "linewidth": 0}
    ax.text(left + width / 2, top + 0.5, text, ha="center", va="center", fontsize=10, bbox=plain)


def _row(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


def draw_dispatch(x: "Tensor", ids: "Tensor", weights: "Tensor", names: Sequence[str],
                  out: "Tensor") -> None:  # fmt: skip
    """Draw tokens on the left, the batch of every expert in the middle, outputs on the right.

    Args:
        x: [N, d], the rows of at most three tokens.
        ids: [N, k], their experts.
        weights: [N, k]
        names: what each expert does.
        out: [N, d]
    """
    fig, ax = figure("tokens, experts, tokens", "rows", size=(9.6, 4.0))
    batches = [(ids == expert).nonzero().tolist() for expert in range(len(names))]
    top = 0.0
    for expert, batch in enumerate(batches):
        ax.text(6.1, top + 0.5, f"expert {expert}: {names[expert]}", va="center", ha="right",
                fontsize=10)  # fmt: skip
        for place, (token, choice) in enumerate(batch):
            _box(ax, 6.3 + 2.0 * place, top, 1.9, f"t{token} · {float(weights[token, choice]):g}",
                 **LOOKS[token])  # fmt: skip
        if not batch:
            _box(ax, 6.3, top, 1.9, "no token", **IDLE)
        top += 1.5
    for token, row in enumerate(x.tolist()):
        at = 0.6 + 1.8 * token
        _box(ax, 0, at, 2.3, f"t{token}  {_row(row)}", **LOOKS[token])
        _box(ax, 13.3, at, 2.3, f"t{token}  {_row(out[token].tolist())}", **LOOKS[token])
    titles = {
        1.15: "tokens",
        8.6: "each expert's batch, and the weights of its results",
        14.45: "added up per token",
    }
    for left, words in titles.items():
        ax.text(left, -0.35, words, ha="center", va="bottom", fontsize=10)
    for left, high, word in ((3.2, top / 2 - 0.25, "dispatch →"), (12.2, top - 1, "combine →")):
        ax.text(left, high, word, ha="center", va="center", fontsize=10)
    ax.set(xlim=(-0.2, 15.8), ylim=(top, -1.0))
    ax.axis("off")
    sizes = ", ".join(str(len(batch)) for batch in batches)
    show(
        fig,
        f"{len(x)} tokens go to {ids.shape[1]} of {len(names)} experts each. The experts get "
        f"{sizes} rows; each row comes back times its weight, and a token adds up what it gets.",
    )


def draw_distinct(found: Mapping[int, Sequence[int]], num_experts: int, per_token: int) -> None:
    """Draw how many experts a step reads against its tokens: counted per layer, and expected."""
    fig, ax = figure("tokens in a step (logarithmic)", "experts that are read", size=(7.4, 3.9))
    tokens = list(found)
    many = [min(tokens) * (max(tokens) / min(tokens)) ** (place / 60) for place in range(61)]
    expected = [num_experts * (1 - (1 - per_token / num_experts) ** each) for each in many]
    ax.plot(many, expected, "k--", linewidth=1.4, label="expected: every expert equally likely")
    for at, counts in found.items():
        label = "counted in the engine, one dot per layer" if at == tokens[0] else None
        ax.plot([at] * len(counts), counts, "o", color="#08519c", markersize=5, label=label)
    ax.plot(many, [min(each * per_token, num_experts) for each in many], color="#999999",
            linestyle=":", label="if no two tokens shared an expert")  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_xticks(tokens, [f"{each}" for each in tokens])
    ax.set_ylim(0, 1.12 * num_experts)
    ax.legend(loc="lower right", fontsize=9)
    middle = tokens[len(tokens) // 2]
    show(
        fig,
        f"Experts that a step reads of {num_experts}, with {per_token} per token: the dots lie "
        f"near the dashed line, which is "
        f"{expected_distinct(num_experts, per_token, middle):.0f} at "
        f"{middle} tokens and {expected_distinct(num_experts, per_token, tokens[-1]):.0f} at "
        f"{tokens[-1]}.",
    )


def draw_steps(models: Mapping[str, ModelConfig], gpu: Hardware, tokens: Sequence[int]) -> None:
    """Draw the bound of a step of each of two models, and below it the ratio, against tokens."""
    fig, axes = figure(
        "tokens in a step (logarithmic)",
        "bound of a step (ms, logarithmic)",
        cols=2,
        size=(9.6, 3.9),
    )
    times = {
        name: [1e3 * ch18.seconds(config, gpu, each) for each in tokens]
        for name, config in models.items()
    }
    for number, (name, values) in enumerate(times.items()):
        axes[0].plot(tokens, values, label=name, **series(number))
    axes[0].set_yscale("log")
    ticks = [2, 5, 10, 20]
    axes[0].set_yticks(ticks, [f"{each}" for each in ticks])
    axes[0].minorticks_off()
    axes[0].legend(loc="upper left", fontsize=9)
    one, other = times.values()
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    axes[1].plot(tokens, ratios, **series(2))
    bound(axes[1], tokens, [1.0] * len(tokens), "as long as the dense one", "below", at=0.5)
    axes[1].set(ylabel="times as long as the dense one", ylim=(0, 1.1 * max(ratios)))
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xticks([1, 8, 64, 512, 4096], ["1", "8", "64", "512", "4,096"])
    most = max(range(len(tokens)), key=lambda place: ratios[place])
    show(
        fig,
        f"The bound of a step on an {gpu.name}. With {tokens[0]} token the step of "
        f"{next(iter(times))} takes {ratios[0]:.1f} times as long as that of "
        f"{list(times)[1]}, with {tokens[most]:,} tokens {ratios[most]:.1f} times and with "
        f"{tokens[-1]:,} tokens {ratios[-1]:.1f} times.",
    )


def draw_loads(rows: Mapping[str, Sequence[int]]) -> None:
    """Draw the rows of every GPU in one step, the GPUs with the most first, one panel per way."""
    fig, axes = figure("GPUs, the busiest first", "rows in a step", cols=len(rows), size=(9.6, 3.3))
    highest = max(max(values) for values in rows.values())
    for number, (ax, (name, values)) in enumerate(zip(axes, rows.items(), strict=True)):
        mean = sum(values) / len(values)
        ax.bar(
            range(len(values)), sorted(values, reverse=True), **LOOKS[number] | {"linewidth": 0.5}
        )
        ax.axhline(mean, color="black", linestyle="--", linewidth=1.2)
        ax.text(len(values) - 0.5, mean + 0.02 * highest, f"mean {mean:.0f}", ha="right",
                va="bottom", fontsize=9)  # fmt: skip
        ax.set(title=name, ylim=(0, 1.05 * highest))
        ax.set_xticks([0, len(values) - 1], ["1", f"{len(values)}"])
        ax.yaxis.set_major_formatter("{x:,.0f}")
        if number:
            ax.set_ylabel("")
    (first, *_, last) = rows
    show(
        fig,
        f"Rows of each GPU in one simulated step, which ends when the busiest is done: after "
        f"{max(rows[first]):,} rows '{first}', after {max(rows[last]):,} rows '{last}'.",
    )
