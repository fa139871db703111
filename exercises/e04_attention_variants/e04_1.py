"""e04.1: attention whose query heads share keys and values. The task is in README.md."""

from torch import Tensor


def grouped_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return causal attention for the last T of S positions, without copies of keys or values.

    queries [T, H, Dk], keys [S, Hkv, Dk], values [S, Hkv, Dv] -> [T, H, Dv], all float64; query
    head h reads key-value head h // (H / Hkv).
    """
    raise NotImplementedError(
        "TODO e04.1: multiply each group of query heads with its one key head"
    )
