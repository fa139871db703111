"""e01.4: one program for several families of models. The task is in README.md."""

from typing import Any

from torch import Tensor


def frequencies(config: dict[str, Any]) -> Tensor:
    """Return the angle per position of each pair of a head, float32 [head_dim / 2].

    `config` has head_dim and rope_theta, and for Llama 3 "rope_scaling", a dict with factor,
    low_freq_factor, high_freq_factor and original_max_position_embeddings (else None, or no such
    key).
    """
    raise NotImplementedError("TODO e01.4: theta ** (-2 i / D), scaled as Llama 3 does it")


def forward(weights: dict[str, Tensor], config: dict[str, Any], ids: list[int]) -> Tensor:
    """Return the logits [T, V], float32. What the file has is used: biases of q, k and v, norms of
    query and key heads, a matrix of its own for the logits."""
    raise NotImplementedError("TODO e01.4: the program of e01.3, asking what the file has")
