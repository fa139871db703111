"""The flat batch: all that a forward pass is told about the requests in it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """N tokens of B sequences, one after another, without padding.

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
