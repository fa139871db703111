"""e11.2 in tiles of sixteen tokens, for any page size, with matrix products.

A part is a run of neighbouring tiles. It stores its own result, already divided, and the logarithm
of its sum of exponentials; the parts of a head are then weighted by a softmax of these logarithms.
"""

import torch
import triton
import triton.language as tl

TILE = tl.constexpr(16)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def locate(table, token, exists, PAGE: tl.constexpr):
    """Where tokens lie in the cache, counted in tokens."""
    page = tl.load(table + token // PAGE, mask=exists, other=0)
    return page.to(tl.int64) * PAGE + token % PAGE


@triton.jit
def attend(
    queries, keys, vals, tables, lengths, results, logs, scale, heads, width, splits,
    PAGE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    """A program for a sequence, a KV head and a part, counted in one number."""
    number = tl.program_id(0)
    split, kv = number % splits, number // splits % KV
    sequence = number // splits // KV
    group = heads // KV
    length = tl.load(lengths + sequence)
    tiles = tl.cdiv(tl.cdiv(length, TILE), splits)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    head = sequence * heads + kv * group + row
    own = (row < group)[:, None]
    query = tl.load(queries + head[:, None] * DIM + dim[None, :], mask=own, other=0.0)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    for tile in range(split * tiles, (split + 1) * tiles):
        token = tile * TILE + tl.arange(0, 16)
        exists = token < length
        place = locate(tables + sequence * width, token, exists, PAGE) * KV + kv
        address = place[:, None] * DIM + dim[None, :]
        key = tl.load(keys + address, mask=exists[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
        score += tl.where(exists, 0.0, -1e30)[None, :]
        higher = tl.maximum(top, tl.max(score, 1))
        power = tl.where(exists[None, :], tl.exp2(score - higher[:, None]), 0.0)
        shrink = tl.exp2(top - higher)
        val = tl.load(vals + address, mask=exists[:, None], other=0.0)
        total = total * shrink + tl.sum(power, 1)
        sums = tl.dot(power, val, sums * shrink[:, None], input_precision="ieee")
        top = higher
    some = total > 0.0
    at = head * splits + split
    tl.store(logs + at, tl.where(some, top + tl.log2(total), -1e30), mask=row < group)
    part = sums / tl.where(some, total, 1.0)[:, None]
    tl.store(results + at[:, None] * DIM + dim[None, :], part, mask=own)


@triton.jit
def merge(results, logs, out, splits, DIM: tl.constexpr):
    """One head: each part by its share of the powers."""
    head, dim = tl.program_id(0), tl.arange(0, DIM)
    top = tl.load(logs + head * splits)
    for split in range(1, splits):
        top = tl.maximum(top, tl.load(logs + head * splits + split))
    total = 0.0
    result = tl.zeros((DIM,), tl.float32)
    for split in range(splits):
        at = head * splits + split
        share = tl.exp2(tl.load(logs + at) - top)
        result += share * tl.load(results + at * DIM + dim)
        total += share
    tl.store(out + head * DIM + dim, result / total)


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
    """Attention of each sequence's newest token to what is cached."""
    sequences, heads, dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    results = q.new_empty(sequences, heads, splits, dim)
    logs = q.new_empty(sequences, heads, splits)
    attend[(sequences * kv_heads * splits,)](
        q, k_cache, v_cache, block_tables, seq_lens, results, logs, scale, heads,
        block_tables.stride(0), splits, PAGE=page, DIM=dim,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads)), KV=kv_heads,
    )  # fmt: skip
    merge[(sequences * heads,)](results, logs, out, splits, DIM=dim)
