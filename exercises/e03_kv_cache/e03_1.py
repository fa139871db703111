"""e03.1: the KV cache of one layer. The task is in README.md."""

from torch import Tensor


class KVCache:
    """Keys and values of several requests in one layer, each request in a row of its own.

    The memory is given, filled with NaN: `keys` and `values` are [B, Hkv, S, D], and slot p of
    row b belongs to position p of request b.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Use this memory; nothing is in it yet."""
        raise NotImplementedError("TODO e03.1: keep the memory, and how far each row is filled")

    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Store the next T tokens of a request: keys and values [T, Hkv, D], T at least 1.

        Raises:
            ValueError: they do not fit; then nothing has changed.
        """
        raise NotImplementedError("TODO e03.1: write the tokens behind what the row holds")

    def attend(self, row: int, queries: Tensor) -> Tensor:
        """Causal attention of the queries [T, H, D] of the last T stored tokens -> [T, H, D]."""
        raise NotImplementedError("TODO e03.1: attend to what the row holds, and no further")
