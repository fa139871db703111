"""e11.2: decode attention over pages, one program per sequence, KV head and part.

Three things are to be written: the kernel of a part, the kernel that puts parts together, and the
two launches.
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
    """One part of a sequence, for the GROUP query heads of one KV head.

    It leaves behind, for each of its query heads, the largest score, the sum of weights relative
    to it, and the weighted values. The parameters are a proposal.
    """
    # TODO e11.2: which pages are this part's? What may be read of each?
    tl.static_assert(PAGE > 0)


@triton.jit
def combine_kernel(
    largest, sums, values, out, SPLITS: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr
):
    """All parts of one query head."""
    # TODO e11.2: how much does each part count?
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
    """Write the attention of each sequence's newest token to its cached tokens into out.

    Args:
        q: [sequences, heads, dim], float32.
        k_cache: [pages, page, kv_heads, dim], float32; page and dim are powers of two, dim >= 16.
        v_cache: like k_cache.
        block_tables: [sequences, any], int32: which pages a sequence has, in order. Behind those
            that its length needs stands what was there before.
        seq_lens: [sequences], int32: cached tokens, 0 and more.
        scale: multiplies the scores.
        splits: into how many parts a sequence is cut; some may be empty.
        out: [sequences, heads, dim], float32, to be filled; 0 for a sequence without tokens.
    """
    raise NotImplementedError("TODO e11.2: launch the kernels")
