"""The pictures and tables of chapter 16: steps with their drafts, races, prices, gains."""

from collections.abc import Mapping, Sequence
from math import log
from typing import TYPE_CHECKING, Any

from minillm_exercises.chapters.ch16 import Verified
from minillm_exercises.chapters.common import show_table
from minillm_exercises.plots import bars, bound, box, figure, note, series, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from minillm.text.tokenizer import Tokenizer

ACCEPTED: dict[str, Any] = {"facecolor": "#9ecae1", "edgecolor": "black", "linewidth": 1.2}
REJECTED: dict[str, Any] = {"facecolor": "white", "edgecolor": "#888888", "linewidth": 1.0,
                            "linestyle": "--"}  # fmt: skip
OWN: dict[str, Any] = {"facecolor": "#fdd49e", "edgecolor": "black", "linewidth": 3.0}


def shown(tokenizer: "Tokenizer", token: int) -> str:
    """A token as text, with its blanks and line ends visible, cut where it is long."""
    text = tokenizer.decode([token]).replace("\n", "\u21b5").replace(" ", "\u00b7")
    return text if len(text) <= 10 else text[:9] + "\u2026"


def draw_rounds(rounds: Sequence[Verified], tokenizer: "Tokenizer", k: int) -> None:
    """Draw steps, one per row: drafts that were accepted, those that were rejected, and the token
    that the model itself gave."""
    from matplotlib.patches import Patch

    fig, ax = figure(
        "what the step yields, then what it rejects", "step", size=(8.6, 0.42 * len(rounds) + 1.3)
    )
    for row, each in enumerate(rounds):
        places = [(draft, ACCEPTED) for draft in each.drafts[: each.accepted]]
        places += [(each.last, OWN)]
        for place, (token, look) in enumerate(places):
            _box(ax, place, row, shown(tokenizer, token), look)
        for place, token in enumerate(each.drafts[each.accepted :], each.accepted + 1):
            _box(ax, place, row, shown(tokenizer, token), REJECTED, "#777777")
        told = f"{each.accepted + 1}"
        ax.text(k + 2.25, row, told, ha="center", va="center", fontsize=10)
    ax.text(k + 2.25, -0.85, "tokens\nwon", ha="center", va="bottom", fontsize=9)
    ax.set(xlim=(-0.5, k + 2.7), ylim=(len(rounds) - 0.4, -1.0))
    ax.set_xticks([])
    ax.set_yticks(range(len(rounds)), [f"{row + 1}" for row in range(len(rounds))])
    ax.grid(visible=False)
    looks = {"accepted draft": ACCEPTED, "the model's own token": OWN, "rejected draft": REJECTED}
    handles = [Patch(label=name, **look) for name, look in looks.items()]
    fig.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=9)
    won = sum(each.accepted + 1 for each in rounds)
    show(
        fig,
        f"The first {len(rounds)} steps with {k} drafts each: drafts in a thin frame were "
        "accepted, dashed ones rejected, and the token in a thick frame is the model's own; "
        f"{won} tokens in all.",
    )


def _box(ax: "Axes", place: int, row: int, text: str, look: Mapping[str, Any],
         colour: str = "black") -> None:  # fmt: skip
    left = place - 0.46 + (0.55 if look is REJECTED else 0)
    box(ax, left, row - 0.36, 0.92, 0.72, look, text, fontsize=9, color=colour, family="monospace")


def show_step(each: Verified, known: str, tokenizer: "Tokenizer") -> None:
    """Show a step as a table: what was drafted at each place, and what the model sampled there."""
    rows = []
    samples = [*each.drafts[: each.accepted], each.last]
    for place in range(len(each.drafts) + 1):
        draft = shown(tokenizer, each.drafts[place]) if place < len(each.drafts) else None
        reads = known if place == 0 else f"draft {place}"
        if place > each.accepted:
            sample, verdict = "(of no use)", "the text before it is wrong"
        else:
            sample = f"`{shown(tokenizer, samples[place])}`"
            right = place < each.accepted
            verdict = "equal: accepted" if right else "differs: the sample is kept"
            verdict = verdict if draft else "one more, for nothing"
        rows.append([place + 1, reads, f"`{draft}`" if draft else "", sample, verdict])
    show_table([
        "place", "the model has read up to", "the draft for the next place",
        "the model's sample for it", "",
    ], rows)  # fmt: skip


def show_race(p: Sequence[float], q: Sequence[float], noise: Sequence[float]) -> None:
    """Show two distributions with the same noise: logarithms plus noise, the largest marked."""
    ours, theirs = ([log(x) + g for x, g in zip(dist, noise, strict=True)] for dist in (p, q))

    def cell(values: Sequence[float], at: int) -> str:
        return f"**{values[at]:.2f}**" if values[at] == max(values) else f"{values[at]:.2f}"

    rows = [
        ["abcdefgh"[at], f"{p[at]:g}", f"{q[at]:g}", f"{noise[at]:g}", cell(ours, at),
         cell(theirs, at)]
        for at in range(len(p))
    ]  # fmt: skip
    head = ["token", "p (model)", "q (draft)", "noise g", "ln p + g", "ln q + g"]
    show_table(head, rows)


def draw_rows(
    seconds: Mapping[str, Mapping[int, float]], least: Mapping[str, Mapping[int, float]]
) -> None:
    """Draw the time of a pass over several rows in units of a plain step, and its bound."""
    fig, _ = figure("rows (1 token and its drafts)", "time / plain step", cols=len(seconds))
    most = max(values[max(values)] / values[1] for values in seconds.values())
    for ax, (name, times) in zip(fig.axes, seconds.items(), strict=True):
        rows = list(times)
        ax.plot(rows, [times[row] / times[1] for row in rows], label="measured", **series(0))
        one_by_one = [float(row) for row in rows]
        ax.plot(rows, one_by_one, label="as many plain steps", **series(1))
        floor = [least[name][row] / times[1] for row in rows]
        ax.plot(rows, floor, "k--", linewidth=1.2, label="bound: bytes and operations")
        ax.set(title=name, ylim=(0, 1.9 * most))  # as many plain steps leave the picture
        ax.set_xticks(rows)
    handles, labels = fig.axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    told = ", ".join(f"{t[5] / t[1]:.2f} for {name}" for name, t in seconds.items())
    show(
        fig,
        f"Measured: one pass over several tokens of a text, in units of a plain step; five rows "
        f"take {told}, where five plain steps take five.",
    )


def draw_agreement(
    measured: Mapping[str, float], formula: Mapping[str, float], limit: float
) -> None:
    """Draw how often two models draw the same token, counted and by formula."""
    fig, ax = figure("noise of the draft model", "positions with the same token (%)",
                     size=(6.4, 3.6))  # fmt: skip
    places = range(len(measured))
    for number, (name, values) in enumerate((("drawn", measured), ("formula", formula))):
        at = [place + 0.4 * number - 0.2 for place in places]
        ax.bar(at, [100 * value for value in values.values()], 0.38, label=name, **bars(number))
    edges = [-0.6, len(measured) - 0.4]
    bound(ax, edges, [100 * limit] * 2, "no draft can agree more often", side="above", at=0.0)
    ax.set_xticks(list(places), list(measured))
    ax.set(xlim=edges, ylim=(0, 100))
    ax.legend(loc="upper right")
    told = ", ".join(f"{100 * value:.0f} % with {name}" for name, value in measured.items())
    show(
        fig,
        f"How often the small model draws the token that the large one draws, at temperature 1: "
        f"{told}; no draft can agree in more than {100 * limit:.0f} %.",
    )


def draw_gains(gains: Mapping[str, Mapping[int, float]], what: str, legend: float = 0.66) -> None:
    """Draw the gain in tokens per second against the batch; `legend` is its height, 0 to 1."""
    fig, ax = figure("batch (sequences, logarithmic)", "tokens per second / plain",
                     size=(7, 3.8))  # fmt: skip
    for number, (name, values) in enumerate(gains.items()):
        ax.plot(list(values), list(values.values()), label=name, **series(number))
    batches = list(next(iter(gains.values())))
    ax.plot(batches, [1.0] * len(batches), color="black", linewidth=1)
    note(ax, "below this line drafts lose", (batches[0], 1.0), (2, -4), va="top")
    ax.set_xscale("log", base=2)
    ax.set_xticks(batches, [f"{batch}" for batch in batches])
    ax.set_ylim(bottom=0)
    ax.legend(loc="center left", bbox_to_anchor=(0.0, legend))
    told = " and ".join(f"{v[batches[-1]]:.2f} ({name})" for name, v in gains.items())
    show(
        fig,
        f"Computed from the bounds of {what}: drafts gain while reading the weights sets the time. "
        f"At a batch of {batches[-1]}, decoding with drafts has {told} of the plain speed.",
    )
