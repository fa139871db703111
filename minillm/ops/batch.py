"""Inputs of operations: the flat batch, one layer's KV cache, and the attention prologue."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """The input of a forward pass: N tokens of B sequences, concatenated without padding.

    Prompts, prefill chunks, decode tokens and drafts have the same form: tokens whose KV is written
    to `slot_mapping` and which attend causally to their sequence.

        tokens      | a a a | b | c c |        B = 3, N = 6
        query_start   0       3   4     6      rows of a sequence: [start, next start)
        seq_lens      8       5   2            length after this step; the length before it is
                                               seq_len - number of rows
    """

    input_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, position of each token in its sequence
    slot_mapping: Tensor  # [N] int64, block * block_size + offset; if shorter, the rest is padding
    query_start: Tensor  # [B + 1] int32
    seq_lens: Tensor  # [B] int32
    block_tables: Tensor  # [B, M] int64
    logits_indices: Tensor  # [K] int64, tokens whose logits are needed
    max_query_len: int


AttentionMode = Literal["fast", "plain", "invariant"]
"""How attention is computed: with the fastest kernel, with plain torch operations, or with a
batch-invariant kernel."""


class Pages(NamedTuple):
    """One layer's keys and values in the KV cache.

    The scales are for a quantised cache, which no operation supports yet.
    """

    key: Tensor  # [blocks, Hkv, block_size, D]
    value: Tensor  # [blocks, Hkv, block_size, Dv]; with MLA the first values of the key
    key_scale: Tensor | None = None  # [blocks, Hkv, block_size]
    value_scale: Tensor | None = None  # [blocks, Hkv, block_size]


class Prologue(NamedTuple):
    """Steps between the QKV projection and attention: heads are split, queries and keys normalised
    (QK norm) if there are weights [D], then rotated (RoPE)."""

    num_kv_heads: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    interleaved: bool
