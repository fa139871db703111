"""What operations are told: the flat batch, a layer's pages of the KV cache, its prologue."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """All that a forward pass is told about its requests: N tokens of B sequences, one after
    another, without padding.

    A prompt, a chunk of one, a decoded token and drafted tokens to verify look the same: rows
    whose keys and values are written to `slot_mapping` and which attend to the sequence's past.

        tokens      | a a a | b | c c |        B = 3, N = 6
        query_start   0       3   4     6      rows of a sequence: [start, next start)
        seq_lens      8       5   2            positions after this step; positions before
                                               it = seq_len - number of rows
    """

    input_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, position of each token in its sequence
    slot_mapping: Tensor  # [N] int64, block * block_size + offset; rows behind it are padding
    query_start: Tensor  # [B + 1] int32
    seq_lens: Tensor  # [B] int32
    block_tables: Tensor  # [B, M] int64
    logits_indices: Tensor  # [K] int64, the rows whose logits are wanted
    max_query_len: int


AttentionMode = Literal["fast", "plain", "invariant"]
"""How attention is computed: as fast as the device can, in plain torch on every device, or with
bits for a token that do not depend on what is computed beside it."""


class Pages(NamedTuple):
    """One layer's keys and values in the KV cache, block by block.

    A quantised cache has a scale beside each head's key or value; no operation reads them yet.
    """

    key: Tensor  # [blocks, Hkv, block_size, D]
    value: Tensor  # [blocks, Hkv, block_size, Dv]; with MLA the first values of the key
    key_scale: Tensor | None = None  # [blocks, Hkv, block_size]
    value_scale: Tensor | None = None  # [blocks, Hkv, block_size]


class Prologue(NamedTuple):
    """What happens to the product of q_proj, k_proj and v_proj before keys are stored: heads are
    split, queries and keys normed where there are weights [D], and rotated."""

    num_kv_heads: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    interleaved: bool
