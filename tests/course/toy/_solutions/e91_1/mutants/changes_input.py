"""You write into the scores you were given: the caller still needs them."""

import torch


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, [..., N] to [..., N]."""
    weights = torch.exp(scores.sub_(scores.amax(dim=-1, keepdim=True)))
    return weights / weights.sum(dim=-1, keepdim=True)
