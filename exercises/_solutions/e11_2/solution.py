"""A page is read once for all heads that share it, and several programs read a long sequence.

Decoding costs the bytes of the cache. So a program is not a query head but a KV head of one
sequence, with all query heads of its group, and each key that it loads is used by all of them.

One long sequence would then be only a few programs, on a chip that runs hundreds. So its pages are
divided among `splits` programs. Each stores three things about its part of the softmax: the largest
score m, the sum l of the weights relative to it, and the sum acc of the weighted values. To combine
the parts, each is rescaled to the largest m of all. A program does the same rescaling from one page
to the next. A part without pages stores m = -inf, so its weight is 0, and a sequence without tokens
consists of such parts only.
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
    """Compute one part of a sequence, for the GROUP query heads of one KV head."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    lane, token, dim = tl.arange(0, LANES), tl.arange(0, PAGE), tl.arange(0, DIM)
    head = (sequence * kv_heads + kv_head) * GROUP + lane
    mine = lane < GROUP
    rows = tl.load(q + head[:, None] * DIM + dim, mask=mine[:, None], other=0.0) * scale
    m = tl.full([LANES], float("-inf"), tl.float32)
    l = tl.zeros([LANES], tl.float32)  # noqa: E741
    acc = tl.zeros([LANES, DIM], tl.float32)
    length = tl.load(lengths + sequence)
    for page in range(split, tl.cdiv(length, PAGE), SPLITS):
        block = tl.load(tables + sequence * table_stride + page).to(tl.int64)
        here = page * PAGE + token < length
        at = ((block * PAGE + token) * kv_heads + kv_head)[:, None] * DIM + dim
        keys = tl.load(k_cache + at, mask=here[:, None], other=0.0)
        scores = tl.sum(rows[:, None, :] * keys[None, :, :], axis=2)
        scores = tl.where(here[None, :], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, axis=1))
        rescale = tl.exp(m - new_m)
        weights = tl.exp(scores - new_m[:, None])
        rows_of_v = tl.load(v_cache + at, mask=here[:, None], other=0.0)
        l = l * rescale + tl.sum(weights, axis=1)  # noqa: E741
        acc = acc * rescale[:, None] + tl.sum(weights[:, :, None] * rows_of_v[None, :, :], axis=1)
        m = new_m
    part = head * SPLITS + split
    tl.store(largest + part, m, mask=mine)
    tl.store(sums + part, l, mask=mine)
    tl.store(values + part[:, None] * DIM + dim, acc, mask=mine[:, None])


@triton.jit
def combine_kernel(
    largest, sums, values, out, SPLITS: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr
):
    """Combine all parts of one query head."""
    head = tl.program_id(0)
    split, dim = tl.arange(0, PARTS), tl.arange(0, DIM)
    part = head * SPLITS + split
    m = tl.load(largest + part, mask=split < SPLITS, other=float("-inf"))
    whole = tl.max(m, axis=0)
    weight = tl.where(m == float("-inf"), 0.0, tl.exp(m - whole))
    l = tl.load(sums + part, mask=split < SPLITS, other=0.0)  # noqa: E741
    total = tl.sum(l * weight, axis=0)
    at = part[:, None] * DIM + dim
    acc = tl.load(values + at, mask=(split < SPLITS)[:, None], other=0.0)
    result = tl.sum(acc * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + head * DIM + dim, result)


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
    """Write the attention of each sequence's newest token over its cached tokens into out."""
    sequences, heads, dim = q.shape
    _, page, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    largest = torch.empty(sequences, heads, splits, device=q.device)
    sums = torch.empty_like(largest)
    values = torch.empty(sequences, heads, splits, dim, device=q.device)
    part_kernel[(sequences, kv_heads, splits)](
        q, k_cache, v_cache, block_tables, seq_lens, scale, largest, sums, values,
        block_tables.stride(0), PAGE=page, DIM=dim, GROUP=group,
        LANES=triton.next_power_of_2(group), SPLITS=splits,
    )  # fmt: skip
    combine_kernel[(sequences * heads,)](
        largest, sums, values, out, SPLITS=splits, PARTS=triton.next_power_of_2(splits), DIM=dim
    )
