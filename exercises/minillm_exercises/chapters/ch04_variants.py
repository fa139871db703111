"""Chapter 04: the trained variants, and what their seeds can tell.

`load_record` reads what their training measured, `judge` says in words which
differences are larger than those between seeds, and `load` reads the committed weights.
"""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from minillm.models.checkpoint import open_model
from minillm.models.decoder import Decoder
from minillm.models.loader import load_model
from minillm.text.tokenizer import Tokenizer
from minillm_exercises.errors import ExerciseError
from minillm_exercises.manifest import exercises_root


def folder(name: str = "") -> Path:
    """Where the trained variants are, or the Hugging Face folder of one of them."""
    return exercises_root().parent / "notebooks" / "variants" / name


def tokenizer() -> Tokenizer:
    """The tokenizer of all variants."""
    return Tokenizer.from_folder(folder("mha"))


def load(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """The weights of a variant's first seed, on the CPU."""
    return load_model(open_model(folder(name)), dtype)


@dataclass(frozen=True)
class Run:
    """One training run: `bits` are bits per byte by held-out text."""

    variant: str
    seed: int
    parameters: int
    kv_bytes: int
    bits: Mapping[str, float]


@dataclass(frozen=True)
class Record:
    """All runs, and how much text each read and was judged by. `controls` are runs of MHA without
    norms on queries and keys, which the variants cannot be compared without."""

    runs: tuple[Run, ...]
    tokens_per_run: int
    held_out_bytes: Mapping[str, int]
    controls: tuple[Run, ...] = ()

    @property
    def variants(self) -> tuple[str, ...]:
        """Names in the order of their runs, largest cache first."""
        return tuple(dict.fromkeys(r.variant for r in sorted(self.runs, key=lambda r: -r.kv_bytes)))

    def bits(self, variant: str, text: str) -> dict[int, float]:
        """Bits per byte of a variant by seed, in the order of the seeds."""
        found = {run.seed: run.bits[text] for run in self.runs if run.variant == variant}
        return dict(sorted(found.items()))

    def widest(self, text: str) -> float:
        """The largest difference between the mean bits per byte of two variants."""
        found = [self.bits(variant, text).values() for variant in self.variants]
        means = [sum(bits) / len(bits) for bits in found]
        return max(means) - min(means)

    def worth_of_norms(self, text: str) -> float:
        """Bits per byte that MHA needs more without them, from the same seeds."""
        return self.below_plain("mha", text)

    def below_plain(self, variant: str, text: str) -> float:
        """Bits per byte that a variant needs less than MHA without norms, from the same seeds."""
        bits = self.bits(variant, text)
        less = [run.bits[text] - bits[run.seed] for run in self.controls]
        return sum(less) / len(less)


def load_record(path: Path | None = None) -> Record:
    """Read results.json of the variants.

    Raises:
        ExerciseError: there is none.
    """
    file = path or folder("results.json")
    if not file.is_file():
        raise ExerciseError(
            f"{file} is missing: it is part of the repository; `git checkout {file}` restores it."
        )
    data = json.loads(file.read_text(encoding="utf-8"))
    runs, controls = (tuple(map(_run, data[kind])) for kind in ("runs", "controls"))
    sizes = {name: text["bytes"] for name, text in data["held_out"].items()}
    return Record(runs, data["tokens_per_run"], sizes, controls)


def _run(told: Mapping[str, Any]) -> Run:
    seed, parameters, kept = (told[k] for k in ("seed", "parameters", "kv_bytes_per_token"))
    return Run(told["variant"], seed, parameters, kept, told["bits_per_byte"])


@dataclass(frozen=True)
class Verdict:
    """What the common seeds of two variants say about their bits per byte on one text.

    `differences` are second minus first, seed by seed: the same seed saw the same rows in the
    same order. `spread` is the larger of the two ranges over a variant's own seeds.
    """

    first: str
    second: str
    differences: tuple[float, ...]
    spread: float
    base: float  # the mean of the first

    @property
    def mean(self) -> float:
        """The mean difference."""
        return sum(self.differences) / len(self.differences)

    @property
    def apart(self) -> bool:
        """Whether every seed agrees on the sign and the mean is larger than the spread."""
        agree = len({difference > 0 for difference in self.differences}) == 1
        return len(self.differences) > 1 and agree and abs(self.mean) > self.spread

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        first, second, n = self.first.upper(), self.second.upper(), len(self.differences)
        if n < 2:
            return f"{second} and {first}: not told apart, because one seed has no spread."
        own = f"a variant's own seeds differ by up to {self.spread:.3f}"
        if not self.apart:
            low, high = min(self.differences), max(self.differences)
            return (
                f"{second} and {first}: not told apart ({second} needs {low:+.3f} to {high:+.3f} "
                f"in {n} seeds, {own})."
            )
        worse, better = (second, first) if self.mean > 0 else (first, second)
        low, *_, high = sorted(map(abs, self.differences))
        return (
            f"{worse} needs {abs(self.mean):.3f} bits per byte more than {better} "
            f"({low:.3f} to {high:.3f} in {n} seeds, {own})."
        )


def judge(record: Record, text: str) -> list[Verdict]:
    """A verdict for each pair of variants, on a held-out text."""
    return [_verdict(record, text, *pair) for pair in combinations(record.variants, 2)]


def _verdict(record: Record, text: str, first: str, second: str) -> Verdict:
    one, other = record.bits(first, text), record.bits(second, text)
    common = [seed for seed in one if seed in other]
    if not common:
        raise ExerciseError(f"{first} and {second} have no seed in common.")
    differences = tuple(other[seed] - one[seed] for seed in common)
    base = sum(one[seed] for seed in common) / len(common)
    ranges = [max(found.values()) - min(found.values()) for found in (one, other)]
    return Verdict(first, second, differences, max(ranges), base)


def luck(seeds: int) -> Fraction:
    """The chance that all runs of one of two equal variants beat all runs of the other."""
    return Fraction(2, math.comb(2 * seeds, seeds))


def false_alarms(seeds: int, variants: int = 4, cases: int = 20_000) -> float:
    """The share of cases in which the rule tells some pair of equal variants apart, simulated:
    every run's bits are drawn from one normal distribution."""
    chance = random.Random(0)
    found = 0
    for _ in range(cases):
        runs = [[chance.gauss(0, 1) for _ in range(seeds)] for _ in range(variants)]
        ranges = [max(bits) - min(bits) for bits in runs]
        for one, other in combinations(range(variants), 2):
            pairs = zip(runs[one], runs[other], strict=True)
            differences = tuple(second - first for first, second in pairs)
            if Verdict("", "", differences, max(ranges[one], ranges[other]), 0.0).apart:
                found += 1
                break
    return found / cases
