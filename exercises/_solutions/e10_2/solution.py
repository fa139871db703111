"""Geometry first, then e10.1 with a row for each query.

The rows of a block are at positions first ... last. Keys after `last` are in the future of all
rows, and keys before first - window + 1 are outside the window of all rows. Both ends are rounded
to whole blocks, and all tiles in between are needed. With a window, long prompts are linear.

In a needed tile, *some* rows may still see nothing. With a window this is usual for the first tile
of a row. Its maximum is then minus infinity until the next tile, and 0 has to be subtracted
instead; FlashAttention's kernels have the same line. A test with a causal prompt and no window
never reaches this case, because every row sees position 0, which is in the first tile.

The log-sum-exp costs one number per row. A backward pass recomputes any tile of weights from it,
and it combines two results over different keys.
"""

import torch
from torch import Tensor


def tiled_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    block_q: int,
    block_k: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """[T, D], [S, D], [S, Dv] -> outputs [T, Dv] and log-sum-exp [T]."""
    length, offset = len(keys), len(keys) - len(queries)
    window = window or length + len(queries)
    outputs = queries.new_zeros(len(queries), values.shape[1])
    sums = queries.new_full((len(queries),), -torch.inf)
    for start in range(0, len(queries), block_q):
        rows = slice(start, min(start + block_q, len(queries)))
        position = torch.arange(rows.start, rows.stop)[:, None] + offset  # [bq, 1]
        first, last = rows.start + offset, rows.stop - 1 + offset
        top = queries.new_full((rows.stop - rows.start, 1), -torch.inf)
        total, mixed = torch.zeros_like(top), torch.zeros_like(outputs[rows])
        left = max(0, first - window + 1) // block_k * block_k
        for begin in range(left, min(last + 1, length), block_k):
            columns = slice(begin, min(begin + block_k, length))
            key = torch.arange(columns.start, columns.stop)  # [bk]
            unseen = (key > position) | (key <= position - window)  # [bq, bk]
            scores = queries[rows] @ keys[columns].T / keys.shape[1] ** 0.5
            scores = scores.masked_fill(unseen, -torch.inf)
            highest = torch.maximum(top, scores.amax(1, keepdim=True))
            base = highest.masked_fill(highest == -torch.inf, 0)  # -inf - -inf would be NaN
            fade, weights = (top - base).exp(), (scores - base).exp()
            total = total * fade + weights.sum(1, keepdim=True)
            mixed = mixed * fade + weights @ values[columns]
            top = highest
        outputs[rows] = mixed / total.masked_fill(total == 0, 1)
        sums[rows] = (top + total.log()).flatten()
    return outputs, sums
