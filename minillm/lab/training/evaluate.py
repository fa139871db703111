"""Logits of a trained model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.lab.training.attention import causal_rows
from minillm.lab.training.trainer import rows_batch
from minillm.models.decoder import Decoder


@torch.no_grad()
def logits_of(model: Decoder, ids: Sequence[int]) -> Tensor:
    """Logits [T, V] in float32 after each of the T tokens of one sequence."""
    input_ids = torch.tensor(ids, device=model.device)
    return model.logits(
        model(rows_batch(input_ids, len(ids)), causal_rows(model.config, len(ids)))
    ).float()
