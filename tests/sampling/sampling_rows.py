"""Rows of a sampler: made, sampled, and edited and truncated as the sampler's parts do it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.api.sampling_params import SamplingParams
from minillm.errors import Failure
from minillm.sampling.edits import Edits
from minillm.sampling.logprobs import TokenLogprob, describe, failure_of
from minillm.sampling.sampler import Sampler
from minillm.scheduling.plan import NewSequence
from minillm.structured.grammars import Grammars
from minillm_kernels import reference

NO_TOKEN = -1  # in `SampledBatch.token_ids`: the row failed


class SamplingRow(NewSequence):
    """A sequence whose next token is drawn with the noise of `position`: by default the number of
    its tokens, which edits that depend on positions need."""

    _position = 0

    def __new__(  # type: ignore[no-untyped-def]
        cls, params: SamplingParams, seed: int, sample_index: int = 0, position: int = 0,
        prompt: Sequence[int] = (), output: Sequence[int] = (), stop_ids=(), bad_words_ids=(),
    ):  # fmt: skip
        shape = 0, sample_index, len(prompt)
        edits = stop_ids, bad_words_ids
        made = super().__new__(cls, *shape, [*prompt, *output], params, seed, *edits)
        made._position = position
        return made

    @property
    def position(self) -> int:
        return self._position or len(self.token_ids)


class SampledBatch(NamedTuple):
    token_ids: list[int]  # [K]; `NO_TOKEN` for a failed row
    logprobs: list[dict[int, TokenLogprob] | None]  # [K]; with logprobs=k: sampled token, top k
    failed: dict[int, Failure]  # by row


def sample(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    row_by_row: bool = False,
    grammars: Grammars | None = None,
    positions: Sequence[int] | None = None,
) -> SampledBatch:
    """Sample one token per row of logits [K, V], with a new `Sampler`; `positions` are by default
    those of the rows."""
    sampler = Sampler(len(rows), logits.shape[1], logits.device)
    sampler.edits.grammars = grammars
    for place, row in enumerate(rows):
        sampler.set_row(place, row)
    at = positions or [row.position for row in rows]
    tokens, best = sampler.choose(logits, range(len(rows)), at)
    failed = {i: why for i, one in enumerate(best.tolist()) if (why := failure_of(one))}
    ids = [NO_TOKEN if i in failed else token for i, token in enumerate(tokens.tolist())]
    counts = {i: row.params.logprobs for i, row in enumerate(rows) if i not in failed}
    at = [i for i, count in counts.items() if count is not None]
    asked = [counts[i] or 0 for i in at]
    entries = describe(logits[at], tokens[at], asked, row_by_row).read() if at else ()
    logprobs = dict(zip(at, entries, strict=True))
    return SampledBatch(ids, [logprobs.get(i) for i in range(len(rows))], failed)


def edit_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Masks, biases and penalties; the logits themselves where no row has any."""
    edits = Edits(len(rows), logits.shape[1], logits.device)
    for place, row in enumerate(rows):
        edits.set_row(place, row, row.token_ids)
    members = edits.rows_of(range(len(rows)), [row.position for row in rows])
    if not members:
        return logits
    result = logits.float().clone()
    positions = [rows[place].position for place in members]
    result[members] = edits.apply(logits[members], members, positions)
    return result


def scale_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Temperature and min-p."""
    numbers = [[row.params.temperature, row.params.min_p] for row in rows]
    temperature, min_p = torch.tensor(numbers).T
    return reference.scale(logits, temperature, min_p)


def truncate_row(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """Top-k and top-p of one row [V]."""
    return reference.truncate(scores[None], torch.tensor([top_k]), torch.tensor([top_p]))[0]
