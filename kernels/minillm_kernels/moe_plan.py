"""Sorts the rows of a mixture-of-experts layer by expert, on the device.

A token that chose k of E experts makes k *pairs* (token, choice); pair p is choice p % k of token
p // k. A program of a product computes `block_m` rows of one expert, so the N k pairs are sorted by
expert, and each expert gets whole blocks, the last one padded:

    ids [N, k]       2 0 | 0 3 | 2 0                      (k = 2, block_m = 2)
    pair_of_row      1 2 | 5 - | 0 4 | 3 -
    expert_of_block    0     0     2     3     -1  -1     (expert 1 has none)

The number of blocks depends on the values of `ids`. Reading them on the host would synchronise,
which CUDA graphs do not allow. The host therefore launches the largest possible number of blocks;
unused blocks have the expert -1 and return at once. Each of A active experts pads at most
block_m - 1 rows, and A is at most min(E, N k).

The sort is a counting sort in one launch. Program e counts the pairs of all experts, which gives
the start of its own blocks, and then writes its pairs in ascending order. Programs share no data,
so there are no atomics and the order is fixed. Each program reads all ids twice: 2 E N k numbers
from the L2 cache, few compared with E weight matrices.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm_kernels.launch import DEBUG, INTERPRETED, KernelError, padded, tl, triton

MAX_CHUNK = 4096  # ids that a program reads at a time


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Upper bound of the number of blocks of `block_m` rows, for any choice of experts."""
    return (num_pairs + min(num_experts, num_pairs) * (block_m - 1)) // block_m


def check_ids(ids: Tensor, num_experts: int) -> None:
    """When debugging or interpreting, check that every id is an expert; raises KernelError."""
    if not (DEBUG or INTERPRETED):
        return
    rows: Sequence[Sequence[int]] = ids.tolist()
    for token, row in enumerate(rows):
        for choice, expert in enumerate(row):
            if not 0 <= expert < num_experts:
                raise KernelError(
                    f"ids[{token}, {choice}] is {expert}; there are experts 0 to {num_experts - 1}."
                )


def make_plan(ids: Tensor, num_experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of `ids` [N, k] by expert, in one launch without synchronisation.

    Returns int32 `expert_of_block` [blocks], -1 for an unused block, and int32 `pair_of_row`
    [blocks, block_m], -1 for padding (in unused blocks nothing is written).
    """
    num_pairs = ids.numel()
    num_blocks = max_blocks(num_pairs, num_experts, block_m)
    expert_of_block = torch.empty(num_blocks, dtype=torch.int32, device=ids.device)
    pair_of_row = torch.empty(num_blocks, block_m, dtype=torch.int32, device=ids.device)
    _plan_kernel[(num_experts,)](
        ids, expert_of_block, pair_of_row, num_pairs, num_blocks, NUM_EXPERTS=num_experts,
        BINS=padded(num_experts + 1), BLOCK_M=block_m,
        CHUNK=min(MAX_CHUNK, padded(num_pairs, 128)), num_warps=4 if num_pairs <= 1024 else 16,
    )  # fmt: skip
    return expert_of_block, pair_of_row


@triton.jit
def existing_expert(expert, num_experts):
    """Clamp an id to the existing experts, so that no memory outside of the weights is read.

    The result of such a token is wrong; other tokens are not affected.
    """
    return tl.minimum(tl.maximum(expert, 0), num_experts - 1).to(tl.int32)


@triton.jit
def _chosen(ids, pairs, num_pairs, NUM_EXPERTS: tl.constexpr):
    """The experts of these pairs; `NUM_EXPERTS` after the last pair."""
    experts = tl.load(ids + pairs, mask=pairs < num_pairs, other=0)
    return tl.where(pairs < num_pairs, existing_expert(experts, NUM_EXPERTS), NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _plan_kernel(
    ids, expert_of_block, pair_of_row, num_pairs, num_blocks, NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e: the start of the blocks of expert e, and their pairs."""
    expert = tl.program_id(0)
    chunk = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, num_pairs, CHUNK):
        counts += tl.histogram(_chosen(ids, first + chunk, num_pairs, NUM_EXPERTS), BINS)

    experts = tl.arange(0, BINS)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(experts < expert, blocks, 0))
    num_own_blocks = tl.sum(tl.where(experts == expert, blocks, 0))
    num_own_pairs = tl.sum(tl.where(experts == expert, counts, 0))

    # The program of the last expert also marks unused blocks.
    own_end = first_block + num_own_blocks
    marked_end = tl.where(expert == NUM_EXPERTS - 1, num_blocks, own_end)
    for first in range(first_block, marked_end, CHUNK):
        block = first + chunk
        tl.store(
            expert_of_block + block, tl.where(block < own_end, expert, -1), mask=block < marked_end
        )

    if num_own_pairs == 0:
        return
    rows = pair_of_row + first_block * BLOCK_M
    num_seen = 0
    for first in range(0, num_pairs, CHUNK):
        mine = _chosen(ids, first + chunk, num_pairs, NUM_EXPERTS) == expert
        rank = num_seen + tl.cumsum(mine.to(tl.int32)) - 1
        tl.store(rows + rank, first + chunk, mask=mine)
        num_seen += tl.sum(mine.to(tl.int32))
    padding = num_own_pairs + tl.arange(0, BLOCK_M)
    tl.store(rows + padding, -1, mask=padding < num_own_blocks * BLOCK_M)
