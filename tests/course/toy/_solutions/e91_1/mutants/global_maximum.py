"""You subtract the maximum of all rows: the other rows then underflow to 0 / 0."""

import torch


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, [..., N] to [..., N]."""
    weights = torch.exp(scores - scores.max())
    return weights / weights.sum(dim=-1, keepdim=True)
