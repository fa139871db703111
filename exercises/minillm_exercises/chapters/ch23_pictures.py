"""Pictures of chapter 23."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from minillm.structured.dfa import Dfa
from minillm.structured.vocabulary import Vocabulary
from minillm_exercises.chapters.ch23 import largest
from minillm_exercises.plots import bars, bound, box, figure, note, series, show

ALIVE: dict[str, Any] = {"facecolor": "#56B4E9", "edgecolor": "black", "linewidth": 0.8}
DEAD: dict[str, Any] = {"facecolor": "white", "edgecolor": "#777777", "linestyle": "--"}


def draw_walk(dfa: Dfa, seen: str, words: Vocabulary) -> None:
    """Draw how the bytes of each token lead from the state after `seen` to a live state or to the
    dead one."""
    start = dfa.after(1, seen.encode())
    walks = []  # the live states behind the bytes of each token, then the dead one, if it comes
    for token in words.tokens:
        states = [dfa.after(start, token[: n + 1]) for n in range(len(token))]
        walks.append(states[: states.index(0) + 1] if 0 in states else states)
    longest = max(map(len, walks))
    fig, ax = figure(
        "byte of the token, and the state behind it",
        "token",
        size=(1.3 * longest + 3.2, 0.4 * len(words) + 1.0),
    )
    allowed = dfa.mask(start, words)
    for row, (token, walk) in enumerate(zip(words.tokens, walks, strict=True)):
        for place, state in enumerate(walk):
            look, colour = (ALIVE, "black") if state else (DEAD, "#777777")
            text = f"{chr(token[place])}  {f'→  {state}' if state else 'dead'}"
            box(ax, place + 0.55, row - 0.36, 0.9, 0.72, look, text, fontsize=9,
                family="monospace", color=colour)  # fmt: skip
        ax.text(longest + 0.7, row, "may come" if allowed[row] else "may not", va="center")
    ax.set(xlim=(0.4, longest + 1.7), ylim=(len(words) - 0.4, -0.6))
    ax.set_xticks(range(1, longest + 1))
    ax.set_yticks(range(len(words)), [each.decode() for each in words.tokens], family="monospace")
    ax.grid(visible=False)
    show(
        fig,
        f"After {seen} the automaton is in state {start}. A token may come if all its bytes lead "
        f"to live states (solid): {int(allowed.sum())} of {len(words)} tokens.",
    )


def draw_difference(
    differences: Mapping[Fraction, Mapping[Fraction, Fraction]], marked: tuple[Fraction, Fraction]
) -> None:
    """Draw the distance of the distributions against the probability of the token that leads into
    the improbable rest: a curve for each probability of that rest, its maximum, an example."""
    fig, ax = figure("probability of the first token that is hard to complete",
                     "difference of the two distributions", size=(7, 3.8))  # fmt: skip
    peaks = []
    for number, (ratio, values) in enumerate(differences.items()):
        look = series(number) | {"marker": ""}
        ax.plot([*map(float, values)], [*map(float, values.values())], **look,
                label=f"valid rest after it: {ratio}")  # fmt: skip
        peaks.append(tuple(map(float, largest(ratio))))
        ax.plot(*peaks[-1], color=look["color"], marker="D", markersize=6)
        note(ax, f"{ratio}", peaks[-1], (0, -8), ha="center", va="top")
    ax.plot(*map(float, marked), "ko", markersize=7, label="the example: t or null")
    bound(ax, [0.0, 1.0], [1.0, 1.0], "no two distributions can differ more", side="above", at=0.0)
    ax.set(ylim=(0, 1.12))
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    told = ", ".join(
        f"{y:.2f} at {x:.2f} for {r}" for (x, y), r in zip(peaks, differences, strict=True)
    )
    show(
        fig,
        f"Difference between masking and rejecting. The diamonds are the largest values: {told}.",
    )


def draw_dists(dists: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]]) -> None:
    """Draw for each prompt the distributions of the texts where invalid ones are thrown away, and
    where a mask is used."""
    fig, _ = figure("text", "probability (%)", cols=len(dists), size=(4.3 * len(dists), 3.3))
    told = []
    for ax, (prompt, both) in zip(fig.axes, dists.items(), strict=True):
        names = list(both[0])
        for number, (name, dist) in enumerate(zip(("rejecting", "masking"), both, strict=True)):
            at = [place + 0.4 * number - 0.2 for place in range(len(names))]
            ax.bar(at, [100 * dist[each] for each in names], 0.38, label=name, **bars(number))
        ax.set_xticks(range(len(names)), [each.strip() for each in names])
        ax.set(title=f"after {prompt!r}", ylim=(0, 100))
        top = max(names, key=lambda each: abs(both[0][each] - both[1][each]))
        told.append(f"{top.strip()} has {100 * both[0][top]:.0f} % and {100 * both[1][top]:.0f} %")
    fig.axes[0].legend()
    show(
        fig,
        f"What tiny writes if invalid texts are thrown away, and with a mask: {'; '.join(told)}.",
    )


def draw_choices(texts: Sequence[str], counts: Sequence[tuple[int, int]]) -> None:
    """Draw how many tokens were allowed at each place of a text; places where all begin with the
    same byte are hatched."""
    fig, ax = figure("the tokens of one text", "allowed tokens (logarithmic)",
                     size=(0.32 * len(texts) + 2.2, 3.6))  # fmt: skip
    for number, (name, only) in enumerate((("more than one way on", False), ("forced text", True))):
        at = [i for i, (_, first) in enumerate(counts) if (first == 1) is only]
        ax.bar(at, [counts[i][0] for i in at], 0.8, label=name, **bars(number))
    ax.set_yscale("log")
    ax.set(ylim=(0.7, 3 * max(count for count, _ in counts)), xlim=(-0.6, len(texts) - 0.4))
    ax.set_xticks(range(len(texts)), [each.replace(" ", "·") for each in texts], rotation=90,
                  family="monospace", fontsize=9)  # fmt: skip
    ax.legend(loc="upper right", ncols=2)
    ones = sum(count == 1 for count, _ in counts)
    forced = sum(first == 1 for _, first in counts)
    show(
        fig,
        f"Of {len(texts)} places of this text {ones} allow a single token, and at {forced} all "
        "allowed tokens begin with the same byte: the text is forced there, its division into "
        "tokens is not.",
    )


def draw_costs(
    seconds: Mapping[str, Mapping[int, float]], steps: Mapping[str, tuple[int, float]],
    least: Mapping[int, float],
) -> None:  # fmt: skip
    """Draw the time of a mask against the size of the vocabulary, with the time of steps."""
    fig, ax = figure("tokens of the vocabulary (logarithmic)", "microseconds (logarithmic)",
                     size=(7.2, 4.0))  # fmt: skip
    for number, (name, values) in enumerate(seconds.items()):
        ax.plot(list(values), [1e6 * value for value in values.values()], label=name,
                **series(number))  # fmt: skip
    for number, (name, (size, value)) in enumerate(steps.items(), start=len(seconds)):
        ax.plot(
            [size],
            [1e6 * value],
            label=f"a step of {name}",
            **series(number) | {"linestyle": "", "markersize": 8},
        )
    floor = [1e6 * value for value in least.values()]
    ax.plot(list(least), floor, "k--", linewidth=1.2, label="bound: bytes of all tokens")
    ax.set(xscale="log", yscale="log")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    told = "; ".join(
        f"{name}: {1e6 * values[max(values)]:.0f} µs" for name, values in seconds.items()
    )
    show(fig, f"Measured: time of one mask, at {max(least):,} tokens {told}.")
