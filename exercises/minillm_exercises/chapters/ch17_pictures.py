"""The pictures of chapter 17: a tree with its accepted path, and curves over rows."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minillm_exercises.chapters.ch16_pictures import ACCEPTED, OWN, REJECTED, shown
from minillm_exercises.chapters.ch17 import Step, paths_of
from minillm_exercises.plots import box, figure, note, series, show

if TYPE_CHECKING:
    from minillm.text.tokenizer import Tokenizer


def draw_tree(step: Step, tokenizer: "Tokenizer") -> None:
    """Draw the drafts of a step from left to right by depth, each beside its parent."""
    tree, tokens = step.tree, [step.known[-1], *step.drafts]
    ends = sorted(paths_of(tree))  # as a walk through the tree meets them
    height = {path[-1]: float(row) for row, path in enumerate(ends)}
    for node in reversed(range(len(tokens))):
        below = [height[n] for n, parent in enumerate(tree.parents, 1) if parent + 1 == node]
        height[node] = sum(below) / len(below) if below else height[node]
    fig, ax = figure(
        "positions behind the last known token", "guesses", size=(8.6, 0.33 * len(ends) + 1.1)
    )
    for node, parent in enumerate(tree.parents, 1):
        ax.plot([tree.depths[parent + 1] + 0.4, tree.depths[node] - 0.4],
                [height[parent + 1], height[node]], color="#888888", linewidth=1)  # fmt: skip
    for node, token in enumerate(tokens):
        look = OWN if node == 0 else ACCEPTED if node in step.path else REJECTED
        box(ax, tree.depths[node] - 0.4, height[node] - 0.36, 0.8, 0.72, look,
            shown(tokenizer, token), fontsize=9, family="monospace")  # fmt: skip
    ax.set(xlim=(-0.6, max(tree.depths) + 0.6), ylim=(len(ends), -1))
    ax.set_xticks(range(max(tree.depths) + 1))
    ax.set_yticks([])
    ax.grid(visible=False)
    show(
        fig,
        f"A step with {len(step.drafts)} drafts in one tree. Boxes in a column are guesses for the "
        f"same position. Blue drafts were accepted, {len(step.path) - 1} of them, and dashed ones "
        "rejected.",
    )


def draw_rows(
    curves: Mapping[str, Mapping[int, float]], y: str, told: str, prices: Sequence[float] = ()
) -> None:
    """Draw curves over the rows of a step, and the cost of the rows at some prices."""
    fig, ax = figure("rows of a step (the last token and its drafts)", y, size=(7.4, 4.0))
    for number, (name, values) in enumerate(curves.items()):
        ax.plot(list(values), list(values.values()), label=name, **series(number))
    most = max(max(values) for values in curves.values())
    top = max(max(values.values()) for values in curves.values())
    for price in prices:
        label = "cost, a row costs so many plain steps" if price == prices[0] else None
        ax.plot([1, most], [1, 1 + price * (most - 1)], "k--", linewidth=1, label=label)
        at = min(most, 1 + (top - 1) / price)
        note(ax, f"{price:g}", (at, 1 + price * (at - 1)), (0, -16))
    ax.set(ylim=(0.95, 1.04 * top))
    ax.legend(loc="lower right")
    show(fig, told)
