"""The maximum is subtracted per row, so that no exponential exceeds 1."""

import torch


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, [..., N] to [..., N]."""
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return weights / weights.sum(dim=-1, keepdim=True)
