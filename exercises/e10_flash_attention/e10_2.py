"""e10.2: attention in tiles, with a sliding window. The task is in README.md."""

from torch import Tensor


def tiled_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    block_q: int,
    block_k: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return causal attention for the last T of S positions, one tile of scores at a time.

    queries [T, D], keys [S, D], values [S, Dv] -> outputs [T, Dv], log-sum-exp [T]; a row sees
    `window` positions up to its own, or all of them if `window` is None.
    """
    raise NotImplementedError("TODO e10.2: compute the tiles in which a row sees a position")
