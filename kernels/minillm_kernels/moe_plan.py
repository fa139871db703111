"""Which rows of a mixture-of-experts product belong together, decided on the device.

A token that chose k of E experts makes k *pairs* (token, choice); pair p is choice p % k of token
p // k. One program of a product works on `block_m` rows of one expert, so the N k pairs are put in
the order of their experts and each expert gets whole blocks, the last one padded:

    ids [N, k]       2 0 | 0 3 | 2 0                      (k = 2, block_m = 2)
    pair_of_row      1 2 | 5 - | 0 4 | 3 -
    expert_of_block    0     0     2     3     -1  -1     (expert 1 has none)

How many blocks that makes depends on the values of `ids`, which the host does not know and must not
ask for: a question would stall it, and a CUDA graph cannot ask. It launches as many blocks as there
can be at most, and those that are not needed carry the expert -1 and return at once. Of A experts
with tokens each pads at most block_m - 1 rows, and A is at most min(E, N k).

The sort is a counting sort in one launch. Program e counts the pairs of all experts, which tells it
where its own blocks begin, and then gives its pairs their places in ascending order. Programs share
nothing, so there are no atomics and no second order of anything. Each reads all ids twice: 2 E N k
numbers from the L2 cache, which is little beside E weight matrices.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm_kernels.launch import DEBUG, INTERPRETED, KernelError, padded, tl, triton

MAX_CHUNK = 4096  # ids that a program looks at in one go


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Blocks of `block_m` rows that the pairs of all experts can fill, whoever chose what."""
    return (num_pairs + min(num_experts, num_pairs) * (block_m - 1)) // block_m


def check_ids(ids: Tensor, num_experts: int) -> None:
    """When debugging or interpreting: every id names an expert (KernelError)."""
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
    """Sort the pairs of `ids` [N, k] by expert: one launch, no waiting.

    Returns int32 `expert_of_block` [blocks], -1 for an unused block, and int32 `pair_of_row`
    [blocks, block_m], -1 for padding (in unused blocks nothing is written).
    """
    num_pairs = ids.numel()
    num_blocks = max_blocks(num_pairs, num_experts, block_m)
    expert_of_block = torch.empty(num_blocks, dtype=torch.int32, device=ids.device)
    pair_of_row = torch.empty(num_blocks, block_m, dtype=torch.int32, device=ids.device)
    _plan_kernel[(num_experts,)](
        ids,
        expert_of_block,
        pair_of_row,
        num_pairs,
        num_blocks,
        NUM_EXPERTS=num_experts,
        BINS=padded(num_experts + 1),
        BLOCK_M=block_m,
        CHUNK=min(MAX_CHUNK, padded(num_pairs, 128)),
        num_warps=4 if num_pairs <= 1024 else 16,
    )
    return expert_of_block, pair_of_row


@triton.jit
def existing_expert(expert, num_experts):
    """An id that names no expert would lead out of the weights: it is taken for the nearest one.

    The token that it belongs to is lost, its neighbours and the process are not.
    """
    return tl.minimum(tl.maximum(expert, 0), num_experts - 1).to(tl.int32)


@triton.jit
def _chosen(ids, pairs, num_pairs, NUM_EXPERTS: tl.constexpr):
    """The experts of these pairs; `NUM_EXPERTS` itself behind the last pair."""
    experts = tl.load(ids + pairs, mask=pairs < num_pairs, other=0)
    return tl.where(pairs < num_pairs, existing_expert(experts, NUM_EXPERTS), NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _plan_kernel(
    ids,
    expert_of_block,
    pair_of_row,
    num_pairs,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program e: where the blocks of expert e begin, and which pairs are in them."""
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

    # The last expert also marks the blocks that nobody needs.
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
