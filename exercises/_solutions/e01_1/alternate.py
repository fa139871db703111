"""Another way: count a whole prompt without a cache, and take a difference of two such counts.

The work after a cache is the work of the whole text minus that of the cached part, so `past` needs
no formula of its own. The matrices of a layer are written as a list.
"""

from dataclasses import dataclass
from math import comb


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
    """Count the operations of a forward pass over `tokens` new tokens after `past` cached ones."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    outputs = [query, key, key, query, *3 * [shape.intermediate]]  # q k v o, gate up down

    def layer(total: int) -> int:
        """Multiply-adds of one layer over a prompt of `total` tokens, nothing cached."""
        pairs = comb(total + 1, 2)
        return total * sum(shape.hidden * width for width in outputs) + pairs * 2 * query

    new = layer(past + tokens) - layer(past)
    return 2 * (shape.layers * new + shape.hidden * shape.vocab)
