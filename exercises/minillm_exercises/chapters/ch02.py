"""What chapter 02 needs beside the engine: a picture of a truncated distribution, a test of counts
against a law, and a measure of how much a text repeats itself."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minillm_exercises.errors import ExerciseError
from minillm_exercises.plots import COLOURS, figure, show

if TYPE_CHECKING:
    from torch import Tensor

    from minillm import LLM

FEWEST_EXPECTED = 5.0  # below this a count is too small for the chi-square law (Cochran, 1954)


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's statistic of counts against a law (1900), and its degrees of freedom."""

    statistic: float
    degrees: int

    @property
    def fits(self) -> bool:
        """Whether the counts may come from the law: the statistic is at most four standard
        deviations above the mean that the law gives it, ``degrees + 4 sqrt(2 degrees)``."""
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


def panels(
    contexts: Mapping[str, "Tensor"], tokens: Sequence[str], temperature: float, top_p: float
) -> None:
    """Draw every token's probability after each text over its rank, one panel per text: thick
    what may be drawn, thin what may not, dotted what it was at temperature 1. `tokens` is the text
    of each token."""
    fig, _ = figure("rank of the token", "probability (%)", cols=len(contexts), size=(9.3, 3.2))
    said = []
    for ax, (text, logits) in zip(fig.axes, contexts.items(), strict=True):
        found, plain = candidates(logits, temperature, top_p), candidates(logits, 1.0, top_p)
        kept, total = found.num_kept, len(found.shares)
        percent = [100 * share for share in found.shares]
        ax.plot(
            range(1, kept + 1), percent[:kept], color=COLOURS[0], lw=4, marker="o", markevery=[-1]
        )
        ax.plot(range(kept, total + 1), percent[kept - 1 :], color=COLOURS[1], lw=1.5)
        ax.plot(range(1, total + 1), [100 * share for share in plain.shares], color="black", ls=":")
        ax.set(xscale="log", yscale="log", ylim=(1e-5, 100))
        best = f"{tokens[found.best]!r} {percent[0]:.0f} %"
        ax.set_title(f"{text!r}\n{best}; {kept:,} of {total:,} kept", fontsize=10)
        said.append(f"{kept:,} after {text!r}")
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
