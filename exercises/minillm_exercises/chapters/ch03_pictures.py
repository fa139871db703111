"""Chapter 03: the picture of what is kept, and what two bugs do to the tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from minillm_exercises.plots import COLOURS, bound, box, figure, show

Found = Sequence[Mapping[str, bool]]  # for each prompt, which test caught a bug
Leads = Sequence[Sequence[float]]  # for each prompt, the lead of each right token


def draw_kept(steps: int) -> None:
    """Draw the keys and values of `steps` steps without and with a cache: computed or kept."""
    from matplotlib.patches import Patch

    titles = ("without a cache", "with a cache")
    fig, axes = figure("position in the text", "step", cols=2, size=(8.2, 2.9))
    computed: dict[str, Any] = {"facecolor": COLOURS[0], "edgecolor": "white", "linewidth": 2}
    kept: dict[str, Any] = {
        "facecolor": "#f2f2f2",
        "edgecolor": "#888888",
        "hatch": "///",
        "linewidth": 1,
    }
    for ax, title in zip(axes, titles, strict=True):
        for step in range(steps):
            for place in range(step + 1):
                again = title == titles[1] and place < step
                look, text = (kept, "") if again else (computed, "k v")
                box(ax, place - 0.42, step - 0.4, 0.84, 0.8, look, text, color="white")
        ax.set(xlim=(-0.6, steps - 0.4), ylim=(steps - 0.4, -0.6), title=title)
        ax.set_xticks(range(steps))
        ax.set_yticks(range(steps), range(1, steps + 1))
        ax.grid(False)
    patches = [Patch(label="computed in this step", **computed), Patch(label="kept", **kept)]
    axes[1].legend(handles=patches, loc="upper right")
    everything = steps * (steps + 1) // 2
    show(
        fig,
        f"Each row is one step, each square one position's key and value. Without a cache {steps} "
        f"steps compute {everything} of them; with a cache {steps}, and the rest is read.",
    )


def draw_caught(found: Mapping[str, Found]) -> None:
    """Draw for each bug and prompt which tests caught it: a filled square, or an empty one."""
    fig, axes = figure("prompt", "test", cols=len(found), size=(9.6, 2.6))
    for ax, (bug, prompts) in zip(axes, found.items(), strict=True):
        tests = list(prompts[0])
        for row, test in enumerate(tests):
            for place, verdicts in enumerate(prompts, 1):
                face = COLOURS[0] if verdicts[test] else "none"
                ax.plot(place, row, "s", markersize=8, color=COLOURS[0], markerfacecolor=face)
            count = sum(verdicts[test] for verdicts in prompts)
            ax.text(len(prompts) + 1, row, f"{count}", va="center", fontweight="bold")
        ax.set_yticks(range(len(tests)), tests)
        ax.set(ylim=(len(tests) - 0.5, -0.5), xlim=(0, len(prompts) + 3), title=bug)
        ax.set_xticks([1, *range(5, len(prompts) + 1, 5)])
        ax.grid(False)
    axes[1].set_yticklabels([])
    axes[1].set_ylabel("")
    show(
        fig,
        f"A filled square is a prompt on which the test catches the bug, and the number beside it "
        f"counts them, of {len(prompts)}. {_reading(found)}",
    )


def _reading(found: Mapping[str, Found]) -> str:
    """Which tests catch every bug on every prompt."""
    tests = list(next(iter(found.values()))[0])
    sure = [
        test
        for test in tests
        if all(verdicts[test] for prompts in found.values() for verdicts in prompts)
    ]
    if not sure:
        return "No test catches every bug on every prompt."
    return f"On every prompt, every bug is caught by: {', '.join(sure)}."


def draw_leads(right: Leads, bugs: Mapping[str, Leads]) -> None:
    """Draw the lead of every right token of all texts: without a bug, and with each bug."""
    fig, axes = figure(
        "lead without a bug (logits)", "lead with the bug (logits)", cols=len(bugs), size=(7.0, 3.1)
    )
    before = [lead for text in right for lead in text]
    top, said = max(before), []
    for ax, (bug, texts) in zip(axes, bugs.items(), strict=True):
        after = [lead for text in texts for lead in text]
        ax.plot(before, after, ".", markersize=2, color=COLOURS[0])
        ax.plot([0, top], [0, top], color="#888888", linewidth=0.8)
        bound(ax, [0, top], [0, 0], "below: another token is written")
        ax.set_title(bug, fontsize=10)
        ax.set_xticks(range(0, int(top) + 1, 4))
        said.append(f"{sum(lead < 0 for lead in after)} of {len(after)} with {bug}")
    lowest = min(ax.get_ylim()[0] for ax in axes)
    for ax in axes:
        ax.set_ylim(lowest - 1, top + 1)
    show(
        fig,
        f"Each point is a right token, whose lead is its logit minus the largest other one; the "
        f"bug changes those below the dashed line: {', '.join(said)}.",
    )
