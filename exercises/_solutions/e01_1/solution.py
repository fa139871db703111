"""Write one term per matrix; then each term can be tested by its *derivative*.

The count is a polynomial in the shape. Its slope in `intermediate` is the MLP alone, and its slope
in `vocab` is the logits alone. So two calls isolate a term in any formula, also in a library whose
source you cannot read. The checks use this to name a missing factor.

Three consequences of the result. Per token the products cost 2 operations per weight, which is the
rule "2N per token". The rule leaves out attention, which exceeds the products when the mean context
reaches weights per layer / (2 * heads * head_dim): 26,624 tokens for the shape of Llama-3.1-8B. GQA
makes the cache smaller but not attention, because kv_heads is not in the term of the pairs. And a
prompt of T tokens has T * (T + 1) / 2 pairs, so doubling a long prompt nearly quadruples that
term.
"""

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
    """Count the operations of a forward pass over `tokens` new tokens after `past` cached ones."""
    query = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    projections = 2 * shape.hidden * query + 2 * shape.hidden * kv  # q, o and k, v
    mlp = 3 * shape.hidden * shape.intermediate  # gate, up, down
    pairs = tokens * past + tokens * (tokens + 1) // 2
    attention = 2 * pairs * query  # scores, then the weighted sum
    logits = shape.hidden * shape.vocab  # tied or not: the product is computed either way
    return 2 * (shape.layers * (tokens * (projections + mlp) + attention) + logits)
