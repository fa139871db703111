"""Sampling of a draft model, with the sampling parameters of each request.

    coupled     argmax(logits / T + noise of the target)    usually agrees; no distribution needed
    otherwise   argmax(logits / T + separate noise)         the distribution is kept

Temperature, min-p, top-k and top-p are the request's. Masks, biases and penalties are not applied;
this only lowers the acceptance rate.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from minillm.ops.philox import Purpose
from minillm.ops.sampling import Pack, choose, dist, draw_params, signed
from minillm.ops.transfers import upload
from minillm.speculative.proposer import Draft, DraftRow


class Draws:
    """The drafts of several rows, sampled position by position.

    Rows are in descending order of `num_drafts`. `tokens` has the drafts of each depth so far,
    int64 [B]; `dists` their distributions, [B, V].
    """

    def __init__(self, rows: Sequence[DraftRow], device: torch.device, coupled: bool):
        self.rows, self.coupled = rows, coupled
        self.pack = pack_of(rows, device)
        self.tokens: list[Tensor] = []
        self.dists: list[Tensor] = []

    def draw(self, logits: Tensor) -> None:
        """Sample one more token for each of the first B rows, from logits [B, V]."""
        pack = self.pack.select(slice(len(logits)))
        pack = pack._replace(position=pack.position + len(self.tokens))
        if self.coupled:
            self.tokens.append(choose(logits, pack)[0])
            return
        self.dists.append(dist(logits, pack))
        ones = torch.ones_like(pack.temperature)
        as_it_is = pack._replace(
            temperature=ones,
            min_p=torch.zeros_like(ones),
            top_p=ones,
            top_k=torch.zeros_like(pack.top_k),
            truncates=False,
        )
        drawn = choose(self.dists[-1].log(), as_it_is, logits.dtype, Purpose.DRAFT)
        self.tokens.append(drawn[0])

    def drafts(self) -> list[Draft]:
        """The drafts of each row. Waits for the device."""
        every = torch.cat(self.tokens).tolist()
        ends = list(accumulate(map(len, self.tokens)))
        ids = [every[end - len(each) : end] for each, end in zip(self.tokens, ends, strict=True)]
        drafts = []
        for i, row in enumerate(self.rows):
            tokens = [depth[i] for depth in ids[: row.num_drafts]]
            dists = [depth[i] for depth in self.dists[: row.num_drafts]]
            drafts.append(Draft(tokens, torch.stack(dists) if dists else None))
        return drafts


def pack_of(rows: Sequence[DraftRow], device: torch.device) -> Pack:
    """Sampling parameters of the rows, at the position after their last token."""
    drawn = [draw_params(row.new.params) for row in rows]
    floats = np.array([draw.floats for draw in drawn], dtype=np.float32).T
    top_k = np.array([draw.top_k for draw in drawn], dtype=np.int32)
    keys = [(signed(row.new.seed), row.new.sample_index, len(row.token_ids)) for row in rows]
    there = upload(device, floats, top_k, np.array(keys, dtype=np.int64).T)
    (temperature, min_p, top_p), top_k_there, (seed, sample_index, position) = there
    truncates = any(draw.truncates for draw in drawn)
    return Pack(temperature, min_p, top_p, top_k_there, seed, sample_index, position, truncates)
