"""Inputs of operations: the flat batch, one layer's KV cache, parameters of QK norm and RoPE."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from numpy.typing import ArrayLike
from torch import Tensor


class Tails(NamedTuple):
    """The order of the last keys of sequences that are paths of token trees (`models/trees.py`).

    Position `starts[b] + i` of sequence b is at place `starts[b] + order[b, i]` of its blocks;
    earlier positions are in order.
    """

    starts: Tensor  # [B] int32; the sequence's length or more if all positions are in order
    order: Tensor  # [B, T] int32


@dataclass(frozen=True)
class Batch:
    """The input of a forward pass: N tokens of B sequences, concatenated without padding.

    Prompts, prefill chunks, decode tokens and drafts have the same form: tokens whose KV is written
    to `slot_mapping` and which attend causally to their sequence.

        tokens      | a a a | b | c c |        B = 3, N = 6
        query_start   0       3   4     6      tokens of a sequence: [start, next start)
        seq_lens      8       5   2            length after this step; before it: 5, 4, 0
    """

    input_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, position of each token in its sequence
    slot_mapping: Tensor  # [N] int64, block * block_size + offset; padding: -1, or no entry
    query_start: Tensor  # [B + 1] int32
    seq_lens: Tensor  # [B] int32
    block_tables: Tensor  # [B, M] int64, M: blocks of the longest sequence
    logits_indices: Tensor  # [K] int64, indices of the tokens whose logits are needed
    max_query_len: int  # largest number of this batch's tokens of one sequence
    tails: Tails | None = None  # with token trees
    on_host: tuple[ArrayLike, ArrayLike] | None = None  # `query_start` and `seq_lens`


AttentionMode = Literal["fast", "plain", "invariant"]
"""The fastest kernel, plain torch operations, or a batch-invariant kernel."""


class Pages(NamedTuple):
    """One layer's KV cache. With scales it has codes (`minillm_kernels/int8_cache.py`)."""

    key: Tensor  # [blocks, Hkv, block_size, D]
    value: Tensor  # [blocks, Hkv, block_size, Dv]; with MLA a view of `key`'s first Dv dimensions
    key_scale: Tensor | None = None  # [blocks, Hkv, block_size]
    value_scale: Tensor | None = None  # [blocks, Hkv, block_size]


Codes = tuple[Tensor, Tensor, Tensor, Tensor]
"""Keys, values and their scales."""


def codes_of(pages: Pages) -> Codes | None:
    """None if pages have no scales."""
    if pages.key_scale is None or pages.value_scale is None:
        return None
    return pages.key, pages.value, pages.key_scale, pages.value_scale


class Prologue(NamedTuple):
    """What happens between QKV projection and attention: heads are split, queries and keys are
    normalised (QK norm) if there are weights [D], then RoPE is applied."""

    num_kv_heads: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    interleaved: bool
