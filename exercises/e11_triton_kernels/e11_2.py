"""e11.2: decode attention over pages, one program per sequence, KV head and part.

Write three things: the kernel of a part, the kernel that combines parts, and the two launches.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def part_kernel(
    q, k_cache, v_cache, tables, lengths, scale, largest, sums, values, table_stride,
    PAGE: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute one part of a sequence, for the GROUP query heads of one KV head.

    For each of its query heads it stores the largest score, the sum of weights relative to it,
    and the sum of weighted values. You may change the parameters.
    """
    # TODO e11.2: find the pages of this part, and the slots to read of each
    tl.static_assert(PAGE > 0)


@triton.jit
def combine_kernel(
    largest, sums, values, out, SPLITS: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr
):
    """Combine all parts of one query head."""
    # TODO e11.2: compute the weight of each part
    tl.static_assert(PARTS > 0)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    splits: int,
    out: torch.Tensor,
) -> None:
    """Write the attention of each sequence's newest token over its cached tokens into out.

    Args:
        q: [sequences, heads, dim], float32.
        k_cache: [pages, page, kv_heads, dim], float32; page and dim are powers of two, dim >= 16.
        v_cache: like k_cache.
        block_tables: [sequences, any], int32: the pages of each sequence, in order. The entries
            after those that its length needs belong to other sequences.
        seq_lens: [sequences], int32: the number of cached tokens, at least 0.
        scale: multiplies the scores.
        splits: the number of parts of a sequence; some may be empty.
        out: [sequences, heads, dim], float32, the result; 0 for a sequence without tokens.
    """
    raise NotImplementedError("TODO e11.2: launch the kernels")
