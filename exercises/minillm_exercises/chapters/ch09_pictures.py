"""Chapter 09: two prompts as a tree of blocks, and what is known of the prompts of a workload."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from minillm_exercises.chapters.ch09 import Job
from minillm_exercises.plots import bars, box, figure, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT, GAP = 1.0, 0.34, 0.25  # of a drawn block, and between two of them
SHARED = "#cccccc"


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many elements two sequences share at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def known_tokens(jobs: Sequence[Job]) -> list[int]:
    """For each prompt, how many of its first tokens begin the text of an earlier job."""
    texts = [job.prompt + job.answer for job in jobs]
    return [
        max((common(job.prompt, text) for text in texts[:number]), default=0)
        for number, job in enumerate(jobs)
    ]


def draw_prompts(workloads: Mapping[str, Sequence[Job]], number: int = 6) -> None:
    """Draw the first prompts of each workload: tokens that begin an earlier text, and the rest."""
    fig, axes = figure(
        "tokens of the prompt", "prompt", cols=len(workloads), size=(2.7 * len(workloads), 2.6)
    )
    for ax, (name, jobs) in zip(axes, workloads.items(), strict=True):
        known = known_tokens(jobs[:number])
        rest = [len(job.prompt) - tokens for job, tokens in zip(jobs, known, strict=False)]
        rows = range(1, len(known) + 1)
        ax.barh(rows, known, 0.7, label="the beginning of an earlier text", **bars(1))
        ax.barh(rows, rest, 0.7, left=known, label="new", **bars(0))
        ax.invert_yaxis()
        ax.set(title=name, yticks=list(rows))
        ax.grid(visible=False, axis="y")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2)
    show(
        fig,
        f"The first {number} prompts of each workload: most of their tokens (hatched) repeat the "
        "beginning of an earlier prompt and its answer.",
    )


def block(ax: "Axes", x: float, y: float, words: str, shared: bool) -> None:
    """Draw one block; blocks of both prompts are grey."""
    look = {"facecolor": SHARED if shared else "white", "edgecolor": "black"}
    box(ax, x, y - HEIGHT / 2, WIDTH, HEIGHT, look, words)


def draw_two(first: Sequence[str], second: Sequence[str], size: int) -> None:
    """Draw two prompts in blocks of `size` words, and beside them the tree of their blocks."""
    texts = [
        [" ".join(text[start : start + size]) for start in range(0, len(text), size)]
        for text in (first, second)
    ]
    same = common(texts[0], texts[1])
    step = WIDTH + GAP
    right = step * max(map(len, texts)) + 1.2
    fig, ax = figure("blocks", "prompts", size=(8.4, 2.3))
    for number, blocks in enumerate(texts):
        y = 1.0 - number
        ax.text(-0.2, y, f"prompt {number + 1}", ha="right", va="center")
        for place, words in enumerate(blocks):
            shared = place < same
            block(ax, step * place, y, words, shared)
            at = 0.5 if shared else y
            if not (shared and number):  # a shared block is drawn once
                block(ax, right + step * place, at, words, shared)
            if place:
                start = right + step * place - GAP
                ax.plot([start, start + GAP], [0.5 if place <= same else y, at], "k-", zorder=0)
    ax.text(step * len(texts[0]) / 2, 1.45, f"two prompts, in blocks of {size} tokens", ha="center")
    ax.text(right + step * len(texts[0]) / 2, 1.45, "in memory: each block once", ha="center")
    ax.set(xlim=(-1.5, right + step * max(map(len, texts))), ylim=(-0.4, 1.7))
    ax.set_axis_off()
    grey = " and ".join(repr(words) for words in texts[0][:same])
    show(
        fig,
        f"Two prompts in blocks of {size} tokens. The blocks {grey} (grey) begin both prompts, so "
        "they are computed and kept once; behind them the tree has two branches.",
    )
