"""You divide by the sum of all rows: each row has a sum of its own."""

import torch


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, [..., N] to [..., N]."""
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return weights / weights.sum()
