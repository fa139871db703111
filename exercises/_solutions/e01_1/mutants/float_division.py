"""You divided with /: above 2**53 a float has lost its last digits. Divide with //."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The numbers of config.json that matter here."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool


def forward_flops(shape: Shape, tokens: int, past: int = 0) -> int:
    """Operations of one forward pass over `tokens` new tokens that follow `past` cached ones."""
    query = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    projections = 2 * shape.hidden * query + 2 * shape.hidden * kv  # q, o and k, v
    mlp = 3 * shape.hidden * shape.intermediate  # gate, up, down
    pairs = tokens * past + tokens * (tokens + 1) / 2
    attention = 2 * pairs * query  # scores, then the weighted sum
    logits = shape.hidden * shape.vocab  # tied or not: the product is computed either way
    return 2 * (shape.layers * (tokens * (projections + mlp) + attention) + logits)
