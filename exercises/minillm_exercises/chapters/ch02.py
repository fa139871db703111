"""What chapter 02 needs beside the engine: a picture of a truncated distribution, a test of counts
against a distribution, and a measure of how much a text repeats itself."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minillm_exercises.errors import ExerciseError
from minillm_exercises.plots import COLOURS, figure, note, show

if TYPE_CHECKING:
    from torch import Tensor

    from minillm import LLM

FEWEST_EXPECTED = 5.0  # below this a count is too small for the chi-square test (Cochran, 1954)


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's statistic of counts against a distribution (1900), and its degrees of freedom."""

    statistic: float
    degrees: int

    @property
    def fits(self) -> bool:
        """Whether the counts may come from the distribution: the statistic is at most four standard
        deviations above its mean then, ``degrees + 4 sqrt(2 degrees)``."""
        return self.statistic <= self.degrees + 4 * math.sqrt(2 * self.degrees)


@dataclass(frozen=True)
class Candidates:
    """The tokens after some text, most probable first: the best one, every token's share of the
    probability, and how many of the first may be drawn."""

    best: int
    shares: tuple[float, ...]
    num_kept: int


def candidates(logits: "Tensor", temperature: float, top_p: float) -> Candidates:
    """Temperature, then top-p, by the engine's own code, for one row of logits [V].

    Shares are those before top-p removes any.

    Raises:
        ExerciseError: the temperature is not positive.
    """
    if not temperature > 0:
        raise ExerciseError(
            f"candidates() was given temperature={temperature}; it must be above 0 (at 0 only "
            f"the best token is left, and there is nothing to draw)."
        )
    import torch

    from minillm_kernels import reference

    scores = (logits - logits.max()) / temperature
    shares = scores.softmax(0).sort(descending=True).values
    off, limit = torch.tensor([0]), torch.tensor([top_p])
    num_kept = int((reference.truncate(scores[None], off, limit) > -math.inf).sum())
    return Candidates(int(scores.argmax()), tuple(shares.tolist()), num_kept)


def draw_steps(logits: "Tensor", temperature: float, share: float, seed: int) -> None:
    """Draw how a few logits [V] become one token: logits, probabilities at a temperature, those
    that top-p keeps, and their scores plus noise, of which the largest is the token. A score is
    the logit minus the largest, divided by the temperature."""
    import torch

    from minillm.ops.philox import Purpose, random_words_of_vocabulary, to_gumbel
    from minillm_kernels import reference

    scores = (logits - logits.max()) / temperature
    shares = (100 * scores.softmax(0)).tolist()
    kept = reference.truncate(scores[None], torch.tensor([0]), torch.tensor([share]))[0]
    seeds, zero = torch.tensor([seed]), torch.tensor([0])  # of the first completion, position 0
    words = random_words_of_vocabulary(seeds, zero, zero, Purpose.SAMPLE, len(scores))
    noise = to_gumbel(words)[0]
    left = [score > -math.inf for score in kept.tolist()]
    token = int((kept + noise).argmax())
    fig, axes = figure("token", "logit", cols=4, size=(9.4, 2.6))
    values = (logits.tolist(), shares, shares, (scores + noise).tolist())
    labels = ("logit", "probability (%)", "before the filter (%)", "score + noise")
    titles = ("the model's logits", f"temperature {temperature:g}", f"top-p {share:g}", "the draw")
    for number, (ax, heights) in enumerate(zip(axes, values, strict=True)):
        if number == 3:  # what the noise is added to
            ax.plot(range(len(scores)), scores.tolist(), "k_", markersize=20, label="score")
            ax.legend(loc="upper left", fontsize=8)
        for place, height in enumerate(heights):
            gone = number > 1 and not left[place]
            look = (
                {"facecolor": "none", "edgecolor": "#888888"} if gone else {"facecolor": COLOURS[0]}
            )
            ax.bar(place, height, **look)
            if height == 0:  # a bar that cannot be seen
                ax.plot(place, 0, "o", color=COLOURS[0], clip_on=False)
            if gone:
                note(ax, "\u00d7", (place, 0), (0, 3), ha="center", fontsize=None)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set(title=titles[number], ylabel=labels[number])
        ax.set_xticks(range(len(heights)))
    top = values[3][token]
    note(axes[3], "drawn", (token, top), (0, 3), ha="center", fontsize=None)
    axes[3].set_ylim(None, top + 0.35 * (top - min(0.0, *values[3])))
    show(
        fig,
        f"From {len(shares)} logits to one token: divide by the temperature, remove tokens "
        f"(\u00d7: top-p keeps {sum(left)}), add random noise to the scores (logits minus the "
        f"largest, divided by {temperature:g}), and take the largest sum, here token {token}.",
    )


def panels(
    contexts: Mapping[str, "Tensor"], tokens: Sequence[str], temperature: float, top_p: float
) -> None:
    """Draw every token's probability after each text over its rank, one panel per text: thick
    what may be drawn, thin what may not, dotted what it was at temperature 1. `tokens` is the text
    of each token."""
    fig, _ = figure("rank of the token", "probability (%)", cols=len(contexts), size=(9.3, 3.5))
    said = []
    for ax, (text, logits) in zip(fig.axes, contexts.items(), strict=True):
        found, plain = candidates(logits, temperature, top_p), candidates(logits, 1.0, top_p)
        kept, total = found.num_kept, len(found.shares)
        percent = [100 * share for share in found.shares]
        may: dict[str, Any] = {"color": COLOURS[0], "lw": 4, "marker": "o", "markevery": [-1]}
        ax.plot(range(1, kept + 1), percent[:kept], label="may be drawn", **may)
        rest: dict[str, Any] = {"color": COLOURS[1], "lw": 1.5, "label": "removed"}
        ax.plot(range(kept, total + 1), percent[kept - 1 :], **rest)
        before = [100 * share for share in plain.shares]
        ax.plot(range(1, total + 1), before, color="black", ls=":", label="at temperature 1")
        ax.set(xscale="log", yscale="log", ylim=(1e-5, 100))
        best = f"{tokens[found.best]!r} {percent[0]:.0f} %"
        ax.set_title(f"{text!r}\n{best}; {kept:,} of {total:,} kept", fontsize=10)
        said.append(f"{kept:,} after {text!r}")
    lines, names = fig.axes[0].get_legend_handles_labels()
    fig.legend(lines, names, loc="outside lower center", ncols=len(names))
    show(
        fig,
        f"Probability of every token over its rank, at temperature {temperature:g} (dotted: at "
        f"1), both axes logarithmic. Thick is what top-p {top_p:g} keeps: {', '.join(said)}.",
    )


def chi_square(counts: Sequence[int], probabilities: Sequence[float]) -> ChiSquare:
    """How far `counts` are from what `probabilities` lead one to expect, ``sum (n - e)^2 / e``.

    Outcomes that are expected less than five times are counted together, rarest first. An outcome
    of probability 0 that did occur makes the statistic infinite.

    Raises:
        ExerciseError: the lengths differ, nothing was counted, or the probabilities are none.
    """
    total = sum(counts)
    if len(counts) != len(probabilities) or total < 1:
        raise ExerciseError(
            f"chi_square() was given {len(counts)} counts of {total} draws and "
            f"{len(probabilities)} probabilities; it needs one probability per count and a draw."
        )
    if min(probabilities) < 0 or abs(sum(probabilities) - 1) > 1e-4:
        raise ExerciseError(
            f"chi_square() was given probabilities from {min(probabilities):g} that sum to "
            f"{sum(probabilities):g}; they must be at least 0 and sum to 1."
        )
    # By probability alone: an order that looked at the counts would gather the low ones in a cell.
    pairs = sorted(zip(probabilities, counts, strict=True), key=lambda pair: pair[0])
    if any(count and not probability for probability, count in pairs):
        return ChiSquare(math.inf, 1)
    cells, expected, seen = [], 0.0, 0
    for probability, count in pairs:
        expected, seen = expected + probability * total, seen + count
        if expected >= FEWEST_EXPECTED:
            cells.append((expected, seen))
            expected, seen = 0.0, 0
    if expected or seen:  # what is left joins the largest
        last_expected, last_seen = cells.pop() if cells else (0.0, 0)
        cells.append((last_expected + expected, last_seen + seen))
    statistic = sum((n - e) ** 2 / e for e, n in cells)
    return ChiSquare(statistic, max(1, len(cells) - 1))


def logprobs(llm: "LLM", ids: list[int]) -> list[float]:
    """Log-probability of each token but the first, given those before it."""
    from minillm import SamplingParams

    params = SamplingParams(prompt_logprobs=0, max_tokens=1)
    known = llm.generate(ids, params, use_tqdm=False)[0].prompt_logprobs
    pairs = zip(ids[1:], (known or [])[1:], strict=True)
    return [seen[token].logprob for token, seen in pairs if seen is not None]


def repeated_share(token_ids: Sequence[int], length: int = 4) -> float:
    """The share of runs of `length` tokens that occurred before in the same text.

    Raises:
        ExerciseError: the text is shorter than one run.
    """
    runs = [tuple(token_ids[at : at + length]) for at in range(len(token_ids) - length + 1)]
    if length < 1 or not runs:
        raise ExerciseError(
            f"repeated_share() was given {len(token_ids)} tokens and runs of {length}; it needs "
            f"at least one run of at least one token."
        )
    return 1 - len(set(runs)) / len(runs)
