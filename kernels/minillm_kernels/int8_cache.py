"""The reference of a KV cache of 8-bit codes with a scale for each token and head.

A key or value x [D] is stored as codes q = round(x / s) with s = max|x| / 127, in float16 and
rounded up, so that no code is above 127. Attention rounds each query head to 8 bits, too, and the
weights p * s of each tile of 64 positions to 7 bits: both of its products are sums of integers.
These are exact in any order: together with fixed tiles, one `exp2` and one order of the tiles, the
result of a query has the same bits in decode, verification of drafts and any chunk of a prompt, and
on every processor. C functions (`minillm/ops/c/int8_cache.c`) and kernels (`int8_pages.py`) compute
these bits, too.

Caches are [blocks, Hkv, block_size, D] with four positions interleaved, as 8-bit products of a CPU
read them: keys, 128 added, [.., block_size / 4, D / 4, 4 positions, 4 dimensions], and values
[.., block_size / 4, D, 4 positions]. Scales are float16 [blocks, Hkv, block_size].
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm_kernels.reference import visible_positions

LEVELS = 127  # of codes and of weights
TILE = 64  # positions
FIRST_PARTS, PART, LATER_PART = 8, 128, 512  # positions with sums of their own, as in decode.c
LOG2_E = 1.44269504
TINY = 1e-30  # weights below are 0
POLYNOMIAL = (1.326472731307149e-3, 9.671512991189957e-3, 5.550733581185341e-2,
              2.4022242426872253e-1, 6.931470036506653e-1, 1.0)  # fmt: skip


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """[.., D] -> codes -127 to 127, float32 [.., D], and scales, float16 [..].

    A row with a NaN or an infinity gets the scale infinity and codes 0: what it meets is NaN.
    """
    x = x.float()
    wanted = x.abs().amax(-1) / LEVELS
    scale = wanted.half()
    above = torch.where(
        scale.float() < wanted, scale.view(torch.int16) + 1, scale.view(torch.int16)
    )
    scale = torch.where(wanted <= 65504, above.view(torch.float16), math.inf)
    divides = ((scale > 0) & scale.isfinite()).unsqueeze(-1)
    return torch.where(divides, (x / scale.float().unsqueeze(-1)).round(), 0.0), scale


def quantize_query(q: Tensor) -> tuple[Tensor, Tensor]:
    """[.., D] -> codes, float32 [.., D], and scales, float32 [..]."""
    q = q.float()
    most = q.abs().amax(-1)
    divides = ((most > TINY) & most.isfinite()).unsqueeze(-1)
    codes = torch.where(divides, (q * levels_per(most).unsqueeze(-1)).round(), 0.0)
    return codes, torch.where(most.isfinite(), most / LEVELS, math.inf)


def levels_per(most: Tensor) -> Tensor:
    """127 / most, rounded once: torch divides a number by a tensor in two steps."""
    return torch.full_like(most, LEVELS) / most


def keys_of(cache: Tensor) -> Tensor:
    """A view of a cache of keys: [blocks, Hkv, block_size / 4, D / 4, 4 positions, 4 dims]"""
    return cache.unflatten(2, (-1, 4)).view(*cache.shape[:2], -1, cache.shape[3] // 4, 4, 4)


def values_of(cache: Tensor) -> Tensor:
    """A view of a cache of values: [blocks, Hkv, block_size / 4, D, 4 positions]"""
    return cache.unflatten(2, (-1, 4)).view(*cache.shape[:2], -1, cache.shape[3], 4)


def write_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    slot_mapping: Tensor,
) -> None:
    """`reference.write_cache` of keys and values [N, Hkv, D], as codes and scales."""
    rows = torch.nonzero(slot_mapping[: len(key)] >= 0).flatten()
    slots, size = slot_mapping[rows], k_cache.shape[2]
    block, offset = slots // size, slots % size
    where = (block, slice(None), offset // 4, slice(None), offset % 4)
    codes, k_scale[block, :, offset] = quantize(key[rows])
    keys_of(k_cache)[where] = (codes + 128).to(torch.uint8).unflatten(-1, (-1, 4))
    codes, v_scale[block, :, offset] = quantize(value[rows])
    values_of(v_cache)[where] = codes.to(torch.int8)


def gather(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The codes of a sequence, as float64 [Hkv, length rounded up to tiles, D]; 0 behind it."""
    blocks = cache[block_table[: -(-length // cache.shape[2])]]
    if cache.dtype == torch.uint8:  # [n, Hkv, size / 4, 4, D / 4, 4]
        found = keys_of(blocks).transpose(3, 4).reshape(blocks.shape).double() - 128
    elif cache.dtype == torch.int8:
        found = values_of(blocks).transpose(3, 4).reshape(blocks.shape).double()
    else:  # scales
        found = blocks.float().unsqueeze(-1)
    found = found.transpose(0, 1).flatten(1, 2)[:, :length]  # [Hkv, length, D]
    return F.pad(found, (0, 0, 0, -length % TILE))


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`reference.paged_attention` of q [N, H, D] over codes and scales -> [N, H, D]."""
    out = torch.zeros_like(q)
    starts, caches = query_start.tolist(), (k_cache, v_cache, k_scale, v_scale)
    for row, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[row], starts[row + 1])
        if length and rows.stop > rows.start:
            k, v, *scales = (gather(cache, block_tables[row], length) for cache in caches)
            out[rows] = attend(q[rows], k, v, scales[0], scales[1], length, scale, window)
    return out


@dataclass
class Sums:
    """Of rows [Hkv, R]: the largest score, the sum of weights, and of weighted values [.., D]."""

    best: Tensor
    total: Tensor
    values: Tensor

    @classmethod
    def empty(cls, like: Tensor) -> "Sums":
        """Those before the first position; `like` is float32 [Hkv, R, D]."""
        none = like[..., 0]
        return cls(torch.full_like(none, -math.inf), none * 0, torch.zeros_like(like))

    def join(self, part: "Sums") -> None:
        """Add the sums of the next part."""
        best = torch.maximum(self.best, part.best)
        old, new = shrink(self.best, best), shrink(part.best, best)
        self.total = fma(part.total, new, self.total * old)
        self.values = fma(part.values, new[..., None], self.values * old[..., None])
        self.best = best


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    length: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """The last T positions of a sequence of `length`: [T, H, D], codes [Hkv, S, D] -> [T, H, D]."""
    count, heads, dim = q.shape
    kv_heads, size = k.shape[:2]
    codes, unit = quantize_query(q)
    rows = codes.view(count, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    factor = unit * (torch.tensor(scale, dtype=torch.float32, device=q.device) * LOG2_E)
    factor = factor.view(count, kv_heads, -1).transpose(0, 1).reshape(kv_heads, -1, 1)
    visible = visible_positions(count, length, window, q.device)
    visible = F.pad(visible, (0, size - length)).repeat_interleave(heads // kv_heads, 0)  # [R, S]
    whole = Sums.empty(rows)
    begin = 0
    while begin < size:
        end = min(begin + (PART if begin < FIRST_PARTS * PART else LATER_PART), size)
        part = Sums.empty(rows)
        for at in range(begin, end, TILE):
            tile = slice(at, at + TILE)
            scores = (rows.double() @ k[:, tile].mT).float() * factor * k_scale[:, tile].mT
            add_tile(part, scores, v[:, tile], v_scale[:, tile].mT, visible[:, tile])
        whole.join(part)
        begin = end
    out = whole.values / whole.total.unsqueeze(-1)
    out = torch.where(whole.total.unsqueeze(-1) == 0, 0.0, out)  # no visible position
    return out.view(kv_heads, count, -1, dim).transpose(0, 1).reshape(q.shape).to(q.dtype)


def add_tile(sums: Sums, scores: Tensor, v: Tensor, v_scale: Tensor, visible: Tensor) -> None:
    """Online softmax of a tile: scores [Hkv, R, 64], codes [Hkv, 64, D], scales [Hkv, 1, 64]."""
    scores = scores.masked_fill(~visible, -math.inf)
    best = torch.maximum(sums.best, scores.amax(-1))
    old = shrink(sums.best, best)
    weights = exp2(scores - best.masked_fill(best == -math.inf, 0)[..., None])
    weights = weights.masked_fill(~visible, 0)
    scaled = (weights * v_scale).masked_fill(~visible, 0)  # unused slots may have any scale
    top = scaled.amax(-1)
    inverse = torch.where((top > TINY) & top.isfinite(), levels_per(top), 0.0)[..., None]
    codes = (scaled.double() * inverse.double()).round()  # the product is not rounded before
    codes = torch.where(inverse == 0, 0.0, codes)
    products = (codes @ v).float()
    sums.values = fma((top / LEVELS)[..., None], products, sums.values * old[..., None])
    sums.total = fma(sums.total, old, tree_sum(weights))
    sums.best = best


def tree_sum(x: Tensor) -> Tensor:
    """The sum of 64 numbers: of halves, of their halves, and so on. [.., 64] -> [..]"""
    while x.shape[-1] > 1:
        first, second = x.chunk(2, -1)
        x = first + second
    return x[..., 0]


def shrink(old: Tensor, new: Tensor) -> Tensor:
    """The factor of sums whose largest score was `old`; 0 if they are empty."""
    none = old == -math.inf
    return exp2((old - new).masked_fill(none, 0)).masked_fill(none, 0)


def exp2(x: Tensor) -> Tensor:
    """2^x for x <= 0, error below 2e-7: 2^n times a polynomial in r, x = n + r. Exactly 1 at 0."""
    x = x.clamp(min=-100)
    n = x.round()
    r, p = x - n, torch.full_like(x, POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        p = fma(p, r, torch.tensor(coefficient, dtype=torch.float32, device=x.device))
    return torch.ldexp(p, n.nan_to_num(0).int()).masked_fill(x.isnan(), math.nan)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a b + c, rounded once."""
    return (a.double() * b.double() + c.double()).float()
