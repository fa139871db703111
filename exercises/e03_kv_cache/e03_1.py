"""e03.1: the KV cache of one layer. The task is in README.md."""

from torch import Tensor


class KVCache:
    """The keys and values of several requests in one layer; each request has its own row.

    The caller provides the memory, filled with NaN: `keys` and `values` are [B, Hkv, S, D].
    Slot p of row b belongs to position p of request b.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Use this memory, in which no token is stored yet."""
        raise NotImplementedError("TODO e03.1: store the memory and the length of each row")

    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Store the next T tokens of a request: keys and values [T, Hkv, D], T at least 1.

        Raises:
            ValueError: the tokens do not fit; nothing is changed.
        """
        raise NotImplementedError("TODO e03.1: write the tokens after those of the row")

    def attend(self, row: int, queries: Tensor) -> Tensor:
        """Return causal attention for the queries [T, H, D] of the last T tokens -> [T, H, D]."""
        raise NotImplementedError("TODO e03.1: attend to the tokens of the row only")
