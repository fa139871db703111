"""From logits to the next token: the whole batch at once, each row with its own parameters.

The order of operations is vLLM's::

    raw log-probabilities are read off                                        logprobs.py
    allowed_token_ids -> bad_words -> min_tokens -> logit_bias -> penalties   edits.py
    temperature -> min_p -> top_k -> top_p -> argmax(logits + Gumbel noise)   ops/sampling.py

A `Sampler` keeps parameters and edits of every persistent row of the runner. Choosing needs no
token of an earlier step on the host, so that a step can be launched before they are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from minillm.batches import upload
from minillm.edits import Edits, SamplingRow
from minillm.logprobs import TokenLogprob, describe, failures
from minillm.ops.sampling import Pack, choose

__all__ = ["NO_TOKEN", "SampledBatch", "Sampler", "SamplingRow", "sample"]

NO_TOKEN = -1  # stands in `SampledBatch.token_ids` where a row failed
SIGN = 2**63


class Sampler:
    """The parameters of every persistent row, and the choice of tokens for some of them."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.device = device
        self.edits = Edits(num_rows, vocab_size, device)
        self._floats = np.zeros((3, num_rows), dtype=np.float32)  # temperature, min-p, top-p
        self._top_k = np.zeros(num_rows, dtype=np.int32)
        self._keys = np.zeros((2, num_rows), dtype=np.int64)  # seed, sample index
        self._truncates = np.zeros(num_rows, dtype=bool)
        self._last: tuple[object, Pack] | None = None  # the columns of the step before

    def set_row(self, row: int, request: SamplingRow) -> None:
        """A sequence has this row from now on."""
        params, self._last = request.params, None
        temperature = 0.0 if params.greedy else params.temperature
        self._floats[:, row] = temperature, params.min_p, params.top_p
        self._top_k[row] = max(params.top_k, 0)
        self._keys[:, row] = (request.seed + SIGN) % (2 * SIGN) - SIGN, request.sample_index
        self._truncates[row] = temperature > 0 and (params.top_k > 0 or params.top_p < 1)
        self.edits.set_row(row, request)

    def move(self, source: int, target: int) -> None:
        """A sequence gets another row."""
        self._last = None
        for column in (self._floats, self._top_k, self._keys, self._truncates):
            column[..., target] = column[..., source]
        self.edits.move(source, target)

    def choose(
        self,
        logits: Tensor,
        rows: Sequence[int],
        positions: Sequence[int],
        forks: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor]:
        """Choose tokens, without waiting for the device.

        Args:
            logits: [R, V], in any floating-point type; not changed.
            rows: R persistent rows. A row stands several times if it has several logits, which only
                a row without edits may have.
            positions: of the R tokens that are chosen.
            forks: for each of the R, how many tokens more are drawn from the same logits, for the
                next sample indices; empty if none are.

        Returns:
            Tokens, int64 [K], those of the same logits side by side; and float32 [K], the largest
            of the logits that each was chosen from, which is not finite where the choice failed.

        A row's token depends on that row alone: its logits, parameters, seed, sample index and
        position, and not on the other rows or on how many there are.
        """
        counts = [1 + each for each in forks] if any(forks) else [1] * len(rows)
        spread = len(rows) < sum(counts)
        of = [i for i, count in enumerate(counts) for _ in range(count)] if spread else []
        pack = self._pack(rows, positions, counts if spread else None)
        index = torch.tensor(of, device=self.device) if spread else None
        tokens, best = choose(logits if index is None else logits[index], pack)
        members = self.edits.rows_of(rows, positions)
        if len(members) > len({rows[i] for i in members}):
            raise ValueError("A row with edits has several logits; it may have one.")
        for part in self.edits.chunks(members):
            chosen, where = set(part), part
            if index is not None:  # every token that is drawn from these logits
                where = [place for place, i in enumerate(of) if i in chosen]
            samples = torch.tensor(where, device=self.device)
            raw = logits if len(part) == len(logits) else logits[torch.tensor(part).to(self.device)]
            edited = self.edits.apply(raw, [rows[i] for i in part], [positions[i] for i in part])
            if index is not None:
                edited = edited.repeat_interleave(torch.tensor([counts[i] for i in part]), dim=0)
            own, left = choose(edited, pack.select(samples), logits.dtype)
            model = best[samples]  # what is wrong with the model's own logits stays
            tokens[samples] = own
            best[samples] = torch.where(model.isfinite(), left, model)
        return tokens, best

    def append(self, rows: Sequence[int], positions: Sequence[int], tokens: Tensor) -> None:
        """The sequences in these different rows got these tokens, int64 [R], at `positions`."""
        self.edits.append(rows, positions, tokens)

    def _pack(
        self, rows: Sequence[int], positions: Sequence[int], counts: list[int] | None
    ) -> Pack:
        """Parameters of rows, each as often as it draws. Only positions change in most steps."""
        key = (tuple(rows), counts)
        if self._last is None or self._last[0] != key:
            of = np.array(rows, dtype=np.int64)
            keys = self._keys[:, of]
            if counts is not None:
                of = of.repeat(counts)
                keys = keys.repeat(counts, axis=1)
                keys[1] += np.fromiter(chain.from_iterable(map(range, counts)), np.int64)
            columns = upload(self.device, self._floats[:, of], self._top_k[of], keys)
            floats, top_k, there = columns
            (temperature, min_p, top_p), (seed, sample_index) = floats, there
            truncates = bool(self._truncates[of].any())
            pack = Pack(temperature, min_p, top_p, top_k, seed, sample_index, seed, truncates)
            self._last = key, pack
        at = np.array(positions, dtype=np.int64)
        (position,) = upload(self.device, at if counts is None else at.repeat(counts))
        return self._last[1]._replace(position=position)


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """One chosen token per row.

    Attributes:
        token_ids: K ids; `NO_TOKEN` where the row failed.
        logprobs: K entries; for a row with `logprobs=k` the chosen token, then the top k.
        failed: row -> one sentence, for rows that could not be sampled. The others are unharmed.
    """

    token_ids: list[int]
    logprobs: list[dict[int, TokenLogprob] | None]
    failed: dict[int, str]


def sample(logits: Tensor, rows: Sequence[SamplingRow], row_by_row: bool = False) -> SampledBatch:
    """Choose one token per row of logits [K, V], by a sampler that is made for this call."""
    sampler = Sampler(len(rows), logits.shape[1], logits.device)
    for row, request in enumerate(rows):
        sampler.set_row(row, request)
    tokens, best = sampler.choose(logits, range(len(rows)), [row.position for row in rows])
    failed = failures(best)
    token_ids = [NO_TOKEN if i in failed else token for i, token in enumerate(tokens.tolist())]
    logprobs: list[dict[int, TokenLogprob] | None] = [None] * len(rows)
    asked = {i: row.params.logprobs for i, row in enumerate(rows) if i not in failed}
    wanted = {i: count for i, count in asked.items() if count is not None}
    if wanted:
        where = torch.tensor(list(wanted), device=logits.device)
        entries = describe(logits[where], tokens[where], list(wanted.values()), row_by_row)
        for i, entry in zip(wanted, entries.read(), strict=True):
            logprobs[i] = entry
    return SampledBatch(token_ids, logprobs, failed)
