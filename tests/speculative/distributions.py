"""The distribution of sampled tokens, written without our code, and how counts compare with it.

A fake model has logits that are a function of the last two tokens: a table [V + 1, V + 1, V], where
V stands for a token before the first. So the distribution of the first tokens can be counted out.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from minillm.api.sampling_params import SamplingParams
from minillm.ops.philox import Purpose
from minillm.ops.sampling import Pack, choose, dist
from minillm.sampling.rules import Rule
from minillm.sampling.sampler import Sampler
from minillm.sampling.verify import match
from tests.sampling.sampling_rows import SamplingRow

V = 8
LEVEL = 1e-6  # of a test: a right engine fails once in so many seeds, and the seeds are fixed
Cells = Mapping[tuple[int, ...], float]  # the distribution of the first tokens


def table(seed: int, scale: float = 1.5, vocab_size: int = V) -> Tensor:
    """Logits of a fake model: float32 [V + 1, V + 1, V]."""
    generator = torch.Generator().manual_seed(seed)
    shape = vocab_size + 1, vocab_size + 1, vocab_size
    return torch.randn(*shape, generator=generator) * scale


def close_to(target: Tensor, seed: int, noise: float = 1.0) -> Tensor:
    """Logits of a draft model that often agrees."""
    generator = torch.Generator().manual_seed(seed)
    return target + noise * torch.randn(*target.shape, generator=generator)


def last_two(history: Sequence[int], vocab_size: int = V) -> tuple[int, int]:
    """Where in a table the logits after these tokens are."""
    padded = (vocab_size, vocab_size, *history)
    return padded[-2], padded[-1]


def pipeline(logits: np.ndarray, params: SamplingParams, output: Sequence[int] = ()) -> np.ndarray:
    """Penalties, temperature, min-p, top-k, top-p, softmax in float64: [V] -> [V]."""
    z = logits.astype(np.float64).copy()
    for token, count in Counter(output).items():
        z[token] = z[token] / params.repetition_penalty if z[token] > 0 else (
            z[token] * params.repetition_penalty
        )  # fmt: skip
        z[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature == 0:
        return np.eye(len(z))[z.argmax()]
    p = np.exp((z - z.max()) / params.temperature)
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = p[order].cumsum() - p[order]
    p[order[before >= params.top_p]] = 0
    return p / p.sum()


def first_dist(target: Tensor, params: SamplingParams, count: int) -> dict:
    """The probability of every run of `count` first tokens."""
    cells: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        cells = {
            (*run, token): before * after
            for run, before in cells.items()
            for token, after in enumerate(
                pipeline(target[last_two(run, target.shape[-1])].numpy(), params, run)
            )
        }
    return cells


def chi_square(drawn: Sequence[tuple[int, ...]], cells: Cells) -> tuple[float, float]:
    """The statistic of these draws, and the largest that a right sampler shows once in 10^6.

    Cells where fewer than 8 draws are expected are put together.
    """
    counts = Counter(drawn)
    impossible = [run for run in counts if cells.get(run, 0.0) <= 0]
    if impossible:
        return float("inf"), 0.0
    total, statistic, df = len(drawn), 0.0, -1
    rare_count = rare_expected = 0.0
    for run, probability in cells.items():
        expected = total * probability
        if expected < 8:
            rare_expected += expected
            rare_count += counts[run]
            continue
        statistic += (counts[run] - expected) ** 2 / expected
        df += 1
    if rare_expected > 0:
        statistic += (rare_count - rare_expected) ** 2 / rare_expected
        df += 1
    return statistic, float(stats.chi2.isf(LEVEL, max(df, 1)))


def distance(dist: Sequence[float] | np.ndarray | Tensor, other: object) -> float:
    """Total variation."""
    return 0.5 * float(np.abs(np.asarray(dist, float) - np.asarray(other, float)).sum())


class Rig:
    """Sequences of a fake model, decoded with drafts by the real sampler in batches.

    The draft model samples from its own table with the temperature, top-k and top-p of the target's
    request, and its own noise; penalties are not its concern.
    """

    def __init__(
        self,
        target: Tensor,
        draft: Tensor,
        params: SamplingParams,
        num_drafts: int,
        rule: Rule | None,
        batch_size: int,
    ):
        self.target, self.draft, self.params = target, draft, params
        self.num_drafts, self.rule, self.batch_size = num_drafts, rule, batch_size
        self.num_drafted = self.num_accepted = 0
        # What a mutant may do wrong:
        self.dist_of_draft: Callable[[Tensor, Pack], Tensor] = dist
        self.purpose = Purpose.DRAFT
        self.sampler = Sampler(batch_size, target.shape[-1], torch.device("cpu"))
        self.sampler.rule = rule

    def run(self, num_sequences: int, num_tokens: int) -> list[tuple[int, ...]]:
        """The first tokens of so many sequences."""
        found = []
        for first in range(0, num_sequences, self.batch_size):
            found += self._batch(
                range(first, min(first + self.batch_size, num_sequences)), num_tokens
            )
        return found

    def _batch(self, seeds: Sequence[int], num_tokens: int) -> list[tuple[int, ...]]:
        outputs: list[list[int]] = [[] for _ in seeds]
        for row, seed in enumerate(seeds):
            self.sampler.set_row(row, SamplingRow(self.params, seed, 0, 0))
        left = list(range(len(seeds)))
        while left:
            self._round(left, seeds, outputs)
            left = [row for row in left if len(outputs[row]) < num_tokens]
        return [tuple(output[:num_tokens]) for output in outputs]

    def _round(self, left: list[int], seeds: Sequence[int], outputs: list[list[int]]) -> None:
        size, k = self.target.shape[-1], self.num_drafts
        start = torch.tensor([len(outputs[row]) for row in left])
        seed = torch.tensor([seeds[row] for row in left])
        two = torch.tensor([last_two(outputs[row], size) for row in left])
        logits, dists, drafts = [self._after(self.target, two)], [], []
        for step in range(k):
            raw = self._after(self.draft, two)
            pack = self._pack(seed, start + step)
            tokens, _ = choose(raw, pack, purpose=self.purpose)
            drafts.append(tokens)
            dists.append(self.dist_of_draft(raw, pack))
            two = torch.stack((two[:, 1], tokens), dim=1)
            logits.append(self._after(self.target, two))
        drafted, dist_of = torch.stack(drafts, dim=1), torch.stack(dists, dim=1)
        own = drafted.tolist()
        rows = [row for row in left for _ in range(k + 1)]
        positions = (start[:, None] + torch.arange(k + 1)).flatten().tolist()
        samples, best = self.sampler.choose(
            torch.stack(logits, dim=1).flatten(0, 1),
            rows,
            positions,
            drafts=dict(zip(left, own, strict=True)),
            dists=dict(zip(left, dist_of.unbind(0), strict=True)),
        )
        assert bool(best.isfinite().all())
        for row, guessed, given in zip(left, own, samples.view(-1, k + 1).tolist(), strict=True):
            kept = given[: match(given, guessed)]
            self.num_drafted += min(len(kept), k)  # drafts that were decided on
            self.num_accepted += len(kept) - 1
            self.sampler.append_run(row, len(outputs[row]), kept)
            outputs[row] += kept

    def _after(self, logits: Tensor, two: Tensor) -> Tensor:
        return logits[two[:, 0], two[:, 1]]

    def _pack(self, seed: Tensor, position: Tensor) -> Pack:
        params, ones = self.params, torch.ones(len(seed))
        truncates = params.top_k > 0 or params.top_p < 1
        return Pack(
            ones * params.temperature,
            ones * params.min_p,
            ones * params.top_p,
            (ones * max(params.top_k, 0)).int(),
            seed,
            torch.zeros_like(seed),
            position,
            truncates,
        )
