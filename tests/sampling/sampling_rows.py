"""Edits and truncation of single rows, as the sampler's parts do them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.sampling.edits import Edits, SamplingRow
from minillm_kernels import reference


def edit_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Masks, biases and penalties; the logits themselves where no row has any."""
    edits = Edits(len(rows), logits.shape[1], logits.device)
    for place, row in enumerate(rows):
        edits.set_row(place, row)
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
