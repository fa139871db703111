"""Sampling where each rank has the logits of a part of the vocabulary.

    rank 0   tokens 0 .. 24,575        best logit --+             winner, its total --+
                                                    +-- largest                       +-- token
    rank 1   tokens 24,576 .. 49,151   best logit --+             winner, its total --+

A greedy row takes the largest logit of all ranks. A random row takes the largest of (logit - best)
/ temperature + noise. The noise is a function of the token's id in the whole vocabulary, so each
rank draws it for its own tokens, and the token is that of a single rank. Ties go to the lowest id.
A rank sends 16 bytes per row, once or twice, in place of the logits. Rows with top-k, top-p, logit
edits, drafts under an acceptance rule, or log-probabilities gather their logits.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.ops import cpu_sampling
from minillm.ops.philox import Purpose, random_words_of_vocabulary, to_gumbel
from minillm.ops.sampling import Pack, choose
from minillm.ops.transfers import indices
from minillm.parallel.communicator import Communicator
from minillm.parallel.split import Split
from minillm.sampling.sampler import NO_DISTRIBUTIONS, NO_DRAFTS, Sampler


class ShardedSampler(Sampler):
    """A sampler for the logits of one rank's tokens."""

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, communicator: Communicator
    ):
        super().__init__(num_rows, vocab_size, device)
        split = Split(communicator.rank, communicator.size)
        self.communicator, self.vocab_size = communicator, vocab_size
        self.held, self.most = split.vocabulary(vocab_size), split.most_tokens(vocab_size)

    def whole(self, logits: Tensor) -> Tensor:
        """[K, V / n] -> [K, V], on every rank. Shares are padded to equal sizes."""
        part = logits.new_full((len(logits), self.most), float("-inf"))
        part[:, : len(self.held)] = logits
        parts = self.communicator.gather(part)  # [n, K, most]
        whole = parts.transpose(0, 1).reshape(len(logits), -1)
        return whole[:, : self.vocab_size].contiguous()

    def choose(
        self,
        logits: Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        forks: Sequence[int] = (),
        drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
        dists: Mapping[int, Tensor | None] = NO_DISTRIBUTIONS,
    ) -> tuple[Tensor, Tensor]:
        """As `Sampler.choose`, for logits [R, V / n]."""
        edited = {rows[i] for i in self.edits.rows_of(rows, positions)}
        ruled = set(drafts) if self.rule else set()
        of_all = [row in edited or row in ruled or bool(self._truncates[row]) for row in rows]
        if all(of_all):
            return super().choose(self.whole(logits), rows, positions, forks, drafts, dists)
        counts = [1 + fork for fork in forks] if any(forks) else [1] * len(rows)
        if not any(of_all):
            return self._choose_here(logits, rows, positions, counts)
        shape, device = sum(counts), self.device
        outputs = (
            torch.empty(shape, dtype=torch.int64, device=device),
            torch.empty(shape, device=device),
        )
        for gathers in (False, True):
            part = [i for i, of_row in enumerate(of_all) if of_row == gathers]
            some = logits[indices(device, part)]
            at = [rows[i] for i in part], [positions[i] for i in part]
            if gathers:
                more = [counts[i] - 1 for i in part]
                chosen = super().choose(self.whole(some), *at, more, drafts, dists)
            else:
                chosen = self._choose_here(some, *at, [counts[i] for i in part])
            samples = np.flatnonzero(np.repeat(of_all, counts) == gathers)
            for whole, chunk in zip(outputs, chosen, strict=True):
                whole.index_copy_(0, indices(device, samples), chunk)
        return outputs

    def _choose_here(
        self, logits: Tensor, rows: Sequence[int], positions: Sequence[int], counts: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Tokens of rows that need only the best logit of all ranks and noise."""
        spread = sum(counts) > len(rows)
        of = indices(self.device, np.repeat(np.arange(len(rows)), counts))  # of each sample
        pack = self._pack(rows, positions, counts if spread else None)
        greedy = pack.temperature <= 0
        tokens, best = self._best_here(logits, pack, of, counts)
        largest = self._gathered(best, tokens)
        tokens, best = largest[1].long(), largest[0].float()
        if (self._floats[0, list(rows)] > 0).any():  # temperatures, on the host
            every = logits[of] if spread else logits
            totals, places = draw_from_shard(every, pack, self.held.start, best)
            drawn = self._gathered(totals, places + self.held.start)[1].long()
            # As on one rank, a row without a finite logit keeps its greedy token.
            tokens = torch.where(greedy | ~best.isfinite(), tokens, drawn)
        return tokens, best

    def _best_here(
        self, logits: Tensor, pack: Pack, of: Tensor, counts: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Ids and values of the largest logits of this rank's tokens, one per sample."""
        if not self.held:
            none = torch.full((len(of),), float("-inf"), device=self.device)
            return torch.full_like(none, self.vocab_size - 1, dtype=torch.int64), none
        alone = pack.select(indices(self.device, np.cumsum(counts) - counts))  # first samples
        alone = alone._replace(temperature=torch.zeros_like(alone.temperature), truncates=False)
        tokens, best = choose(logits, alone)
        return (tokens + self.held.start)[of], best[of]

    def _gathered(self, values: Tensor, ids: Tensor) -> Tensor:
        """The largest value of all ranks and its id, for ties the lowest: float64 [2, K]. A NaN
        wins. Ids are below 2^53, so float64 is exact."""
        parts = self.communicator.gather(torch.stack((values.double(), ids.double())))  # [n, 2, K]
        largest = parts[:, 0].amax(dim=0)
        is_largest = (parts[:, 0] == largest) | parts[:, 0].isnan()
        return torch.stack((largest, parts[:, 1].where(is_largest, torch.inf).amin(dim=0)))


def draw_from_shard(logits: Tensor, pack: Pack, before: int, best: Tensor) -> tuple[Tensor, Tensor]:
    """A rank's best noisy logit float32 [K], and its index in the shard [K].

    Args:
        logits: [K, V / n].
        pack: parameters of the rows; results of greedy rows are unused.
        before: number of tokens before the shard.
        best: float32 [K], the largest logits of the whole rows.
    """
    warm = pack.temperature.masked_fill(pack.temperature <= 0, 1.0)
    if not logits.shape[1]:
        nothing = torch.full((len(logits),), float("-inf"), device=logits.device)
        return nothing, torch.zeros_like(nothing, dtype=torch.int64)
    columns = pack._replace(temperature=warm)[:-1]
    if cpu_sampling.takes(logits):
        return cpu_sampling.draw_from_shard(logits, before, best, Purpose.SAMPLE, *columns)
    scaled = (logits.float() - best[:, None]) / warm[:, None]
    scaled = scaled.masked_fill(scaled < pack.min_p.log()[:, None], float("-inf"))
    stream = pack.seed, pack.sample_index, pack.position, Purpose.SAMPLE
    words = random_words_of_vocabulary(*stream, before + logits.shape[1])[:, before:]
    return (scaled + to_gumbel(words)).max(dim=-1)
