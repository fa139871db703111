"""e01.1: the operations of a forward pass. The task is in README.md."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The numbers of config.json that are needed; the checks pass an object with these fields."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool


def forward_flops(shape: Shape, tokens: int, past: int = 0) -> int:
    """Count the operations of a forward pass over `tokens` new tokens after `past` cached ones.

    A multiply-add is two operations. Count the matrix products of the layers, attention over the
    causal pairs, and the logits of the last token. The count is exact, so it is an int.
    """
    raise NotImplementedError("TODO e01.1: the products per token, the pairs, a row of logits")
