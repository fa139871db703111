"""Fused q/k norm, rotary embedding and KV-cache write, in one launch.

`norm_rope_write` takes the product of all three projections [N, H + 2 Hkv, D], normalises and
rotates the heads of q and k, returns q, and stores k and v in their slots of the paged cache.
Separate kernels would take six launches and move q and k up to four times; this kernel reads and
writes each number once:

    bytes   2 N (H + 2 Hkv) D s, and 4 N D of angles        operations  ~10 N (H + Hkv) D

It is memory-bound for large N. In decode the launch dominates, which fusing reduces: at N = 1 a
Llama-3.1-8B layer moves 24 kB, 6 nanoseconds of an H200's memory bus.

* A program processes `ROWS` heads of q, of k, or of v. The grid depends on shapes only, as CUDA
  graphs require. The slot of a row is read on the device; a row without a slot (-1, or after the
  end of `slot_mapping`) is padding and not stored.
* A head is held as two halves, the first and the second elements of the rotated pairs, so that a
  rotation is four products of whole tiles. Interleaved pairs are split in registers.
* A row's arithmetic does not depend on other rows: the kernel is batch-invariant.

Su et al., RoFormer, 2021; Henry et al., Query-Key Normalization, 2020; Kwon et al., vLLM, 2023.
"""

import torch
from torch import Tensor

from minillm_kernels import require
from minillm_kernels.launch import DEBUG, INTERPRETED, KernelError, cdiv, padded, tl, triton

TILE = 2048  # numbers of a program: four warps, with one 16-byte access per half and thread
INTERPRETED_TILE = 16384  # the cost of an interpreted program does not depend on its size
NUM_WARPS = 4


def rows_of_program(head_dim: int) -> int:
    """Number of heads of a program, from the head dimension only."""
    return max(1, (INTERPRETED_TILE if INTERPRETED else TILE) // padded(head_dim))


@triton.jit
def load_pairs(place, mask, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load the first and the second elements of the pairs of rows of `DIM` numbers, in float32.

    `place` [ROWS, 1] points at the rows. Pair i is (i, i + DIM / 2), or (2i, 2i + 1).
    """
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(place + column, mask=mask & (column < DIM), other=0.0)
        first, second = tl.split(tl.reshape(both, (place.shape[0], HALF, 2)))
    else:
        pair = tl.arange(0, HALF)[None, :]
        inside = mask & (pair < DIM // 2)
        first = tl.load(place + pair, mask=inside, other=0.0)
        second = tl.load(place + DIM // 2 + pair, mask=inside, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_pairs(place, mask, first, second, DIM: tl.constexpr, HALF: tl.constexpr):
    """Store all first elements, then all second elements of the pairs: [ROWS, DIM]"""
    pair = tl.arange(0, HALF)[None, :]
    inside = mask & (pair < DIM // 2)
    tl.store(place + pair, first.to(place.dtype.element_ty), mask=inside)
    tl.store(place + DIM // 2 + pair, second.to(place.dtype.element_ty), mask=inside)


@triton.jit
def normed_pairs(first, second, weight_ptr, eps, dtype: tl.constexpr,
                 DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """RMSNorm over both halves of each row, rounded to the dtype as if it had been stored."""
    squares = tl.sum(first * first + second * second, axis=1)
    scale = tl.rsqrt(squares / DIM + eps)[:, None]
    start = tl.zeros((1, 1), tl.int32)
    weight1, weight2 = load_pairs(weight_ptr + start, start == 0, DIM, HALF, INTERLEAVED)
    first = (first * scale * weight1).to(dtype).to(tl.float32)
    return first, (second * scale * weight2).to(dtype).to(tl.float32)


@triton.jit
def rotated_heads(
    place, token, live, weight_ptr, eps, cos_ptr, sin_ptr, cos_stride, sin_stride,
    DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load heads at `place`, normalise them if there is a weight, and rotate them."""
    first, second = load_pairs(place, live, DIM, HALF, INTERLEAVED)
    if weight_ptr is not None:
        dtype: tl.constexpr = place.dtype.element_ty
        first, second = normed_pairs(first, second, weight_ptr, eps, dtype, DIM, HALF, INTERLEAVED)
    pair = tl.arange(0, HALF)[None, :]
    inside = live & (pair < DIM // 2)
    cos = tl.load(cos_ptr + token.to(tl.int64) * cos_stride + pair, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + token.to(tl.int64) * sin_stride + pair, mask=inside, other=0.0)
    # (x + iy) times (cos + i sin)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def slot_places(
    slot_ptr, token, live, num_slots, num_blocks, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Block and offset of each row, and whether it has a valid slot.

    A slot outside of the cache is not valid: writing to it would be out of bounds.
    """
    slot = tl.load(slot_ptr + token, mask=live & (token < num_slots), other=-1).to(tl.int64)
    kept = (slot >= 0) & (slot // BLOCK_SIZE < num_blocks)
    return slot // BLOCK_SIZE, slot % BLOCK_SIZE, kept


@triton.jit
def copy_rows(source, target, mask, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Copy rows of `DIM` numbers from `source` [ROWS, 1] to `target` [ROWS, 1]."""
    column = tl.arange(0, BLOCK)[None, :]
    numbers = tl.load(source + column, mask=mask & (column < DIM))
    tl.store(target + column, numbers, mask=mask & (column < DIM))


# ---- rotation alone ---------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, num_rows, num_heads,
    x_stride, x_head_stride, cos_stride, sin_stride, out_stride, out_head_stride,
    DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    live = row < num_rows
    token, head = row // num_heads, (row % num_heads).to(tl.int64)
    place = x_ptr + token.to(tl.int64) * x_stride + head * x_head_stride
    first, second = rotated_heads(
        place, token, live, None, 0.0, cos_ptr, sin_ptr, cos_stride, sin_stride,
        DIM, HALF, INTERLEAVED,
    )  # fmt: skip
    target = out_ptr + token.to(tl.int64) * out_stride + head * out_head_stride
    store_pairs(target, live, first, second, DIM, HALF)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """`reference.rotate`: x [N, H, D] (a view with any strides but the last), angles [N, D/2]."""
    require.device(x=x, cos=cos, sin=sin)
    require.same_dtype(x=x)
    require.shape("x", x, "N", "H", "D")
    require.last_contiguous(x=x)
    num_tokens, num_heads, dim = x.shape
    _check_angles(cos, sin, num_tokens, dim)
    out = require.output(out, x.shape, x)
    if not out.numel():
        return out
    num_rows, rows = num_tokens * num_heads, rows_of_program(dim)
    strides = (*x.stride()[:2], cos.stride(0), sin.stride(0), *out.stride()[:2])
    _rotate[(cdiv(num_rows, rows),)](
        x, cos, sin, out, num_rows, num_heads, *strides, DIM=dim, HALF=padded(dim) // 2, ROWS=rows,
        INTERLEAVED=interleaved, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def _check_angles(cos: Tensor, sin: Tensor, num_tokens: int, dim: int) -> None:
    if dim % 2:
        raise KernelError(f"rows of {dim} numbers have no pairs to rotate; D must be even.")
    require.dtype((torch.float32,), cos=cos, sin=sin)
    require.shape("cos", cos, num_tokens, dim // 2)
    require.shape("sin", sin, num_tokens, dim // 2)
    require.last_contiguous(cos=cos, sin=sin)


# ---- KV write alone ---------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _write_cache(
    key_ptr, value_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, num_rows, num_slots, num_blocks,
    key_stride, key_head_stride, value_stride, value_head_stride,
    k_block_stride, k_head_stride, k_stride, v_block_stride, v_head_stride, v_stride,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = row // NUM_HEADS, (row % NUM_HEADS).to(tl.int64)
    block, offset, kept = slot_places(
        slot_ptr, token, row < num_rows, num_slots, num_blocks, BLOCK_SIZE
    )
    source = key_ptr + token.to(tl.int64) * key_stride + head * key_head_stride
    target = k_cache_ptr + block * k_block_stride + head * k_head_stride + offset * k_stride
    copy_rows(source, target, kept, DIM, BLOCK)
    if value_ptr is not None:
        source = value_ptr + token.to(tl.int64) * value_stride + head * value_head_stride
        target = v_cache_ptr + block * v_block_stride + head * v_head_stride + offset * v_stride
        copy_rows(source, target, kept, VALUE_DIM, BLOCK)


def write_cache(
    key: Tensor, value: Tensor | None, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """`reference.write_cache`, for views with any strides but the last. Slots must be distinct.

    A slot outside of the cache is skipped; with MINILLM_DEBUG_KERNELS=1, a KernelError.
    """
    require.device(
        key=key, value=value, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping
    )
    require.shape("key", key, "N", "Hkv", "D")
    num_tokens, num_heads, dim = key.shape
    _check_caches(k_cache, v_cache, slot_mapping, num_heads, dim)
    require.same_dtype(key=key, value=value, k_cache=k_cache, v_cache=v_cache)
    require.last_contiguous(key=key, value=value)
    if value is not None:
        require.shape("value", value, num_tokens, num_heads, v_cache.shape[-1])
    num_rows = num_tokens * num_heads
    if not num_rows:
        return
    block = padded(max(dim, 0 if value is None else value.shape[-1]))
    rows = rows_of_program(block)
    value_strides = (0, 0) if value is None else value.stride()[:2]
    strides = (*key.stride()[:2], *value_strides, *k_cache.stride()[:3], *v_cache.stride()[:3])
    _write_cache[(cdiv(num_rows, rows),)](
        key, value, k_cache, v_cache, slot_mapping, num_rows, len(slot_mapping), len(k_cache),
        *strides, NUM_HEADS=num_heads, DIM=dim, VALUE_DIM=v_cache.shape[-1], BLOCK=block,
        BLOCK_SIZE=k_cache.shape[2], ROWS=rows, num_warps=NUM_WARPS,
    )  # fmt: skip


def _check_caches(
    k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, num_heads: int | str, dim: int
) -> None:
    require.shape("k_cache", k_cache, "blocks", num_heads, "block_size", dim)
    require.shape("v_cache", v_cache, *k_cache.shape[:3], "Dv")
    require.last_contiguous(k_cache=k_cache, v_cache=v_cache)
    check_slots(slot_mapping, k_cache.shape[0] * k_cache.shape[2])


def check_slots(slot_mapping: Tensor, num_slots: int) -> None:
    """Check a slot mapping; its values when debugging."""
    require.dtype(require.INTEGERS, slot_mapping=slot_mapping)
    require.shape("slot_mapping", slot_mapping, "N")
    require.contiguous(slot_mapping=slot_mapping)
    for row, slot in enumerate(slot_mapping.tolist() if DEBUG else ()):
        if slot >= num_slots:
            raise KernelError(
                f"slot_mapping[{row}] is {slot}; the cache has slots 0 to {num_slots - 1}."
            )


# ---- fused ------------------------------------------------------------------------------------


@triton.jit
def rotate_queries(
    row, qkv_ptr, weight_ptr, cos_ptr, sin_ptr, q_ptr, eps, num_tokens,
    qkv_stride, qkv_head_stride, cos_stride, sin_stride, q_stride, q_head_stride,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Normalise, rotate and store the query heads of rows [ROWS, 1]."""
    token, head = row // NUM_HEADS, (row % NUM_HEADS).to(tl.int64)
    live = token < num_tokens
    place = qkv_ptr + token.to(tl.int64) * qkv_stride + head * qkv_head_stride
    first, second = rotated_heads(
        place, token, live, weight_ptr, eps, cos_ptr, sin_ptr, cos_stride, sin_stride,
        DIM, HALF, INTERLEAVED,
    )  # fmt: skip
    target = q_ptr + token.to(tl.int64) * q_stride + head * q_head_stride
    store_pairs(target, live, first, second, DIM, HALF)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def _norm_rope_write(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, slot_ptr, q_ptr, k_cache_ptr,
    v_cache_ptr, eps, num_tokens, num_slots, num_blocks,
    qkv_stride, qkv_head_stride, cos_stride, sin_stride, q_stride, q_head_stride,
    k_block_stride, k_head_stride, k_stride, v_block_stride, v_head_stride, v_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    # The grid: programs of q, then those of k, then as many of v.
    program = tl.program_id(0)
    q_programs = tl.cdiv(num_tokens * NUM_HEADS, ROWS)
    kv_programs = tl.cdiv(num_tokens * NUM_KV_HEADS, ROWS)
    row = tl.arange(0, ROWS)[:, None]
    if program < q_programs:
        rotate_queries(
            row + program * ROWS, qkv_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_ptr, eps, num_tokens,
            qkv_stride, qkv_head_stride, cos_stride, sin_stride, q_stride, q_head_stride,
            NUM_HEADS, DIM, HALF, INTERLEAVED,
        )  # fmt: skip
    else:
        row += (program - q_programs) % kv_programs * ROWS
        token, head = row // NUM_KV_HEADS, (row % NUM_KV_HEADS).to(tl.int64)
        block, offset, kept = slot_places(
            slot_ptr, token, token < num_tokens, num_slots, num_blocks, BLOCK_SIZE
        )
        token_place = qkv_ptr + token.to(tl.int64) * qkv_stride
        if program < q_programs + kv_programs:
            place = token_place + (NUM_HEADS + head) * qkv_head_stride
            first, second = rotated_heads(
                place, token, kept, k_weight_ptr, eps, cos_ptr, sin_ptr, cos_stride, sin_stride,
                DIM, HALF, INTERLEAVED,
            )  # fmt: skip
            target = k_cache_ptr + block * k_block_stride + offset * k_stride
            store_pairs(target + head * k_head_stride, kept, first, second, DIM, HALF)
        else:
            place = token_place + (NUM_HEADS + NUM_KV_HEADS + head) * qkv_head_stride
            target = v_cache_ptr + block * v_block_stride + offset * v_stride
            copy_rows(place, target + head * v_head_stride, kept, DIM, 2 * HALF)


def norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`reference.norm_rope_write`: qkv [N, H + 2 Hkv, D] -> q [N, H, D], k and v cached.

    `qkv`, caches and `out` may be views with any strides but the last. The queries of padding rows
    (slot -1 or none) are written, and are undefined.
    """
    tensors = {"qkv": qkv, "k_cache": k_cache, "v_cache": v_cache}
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    require.device(**tensors, **weights, cos=cos, sin=sin, slot_mapping=slot_mapping)
    require.same_dtype(**tensors, **weights)
    require.shape("qkv", qkv, "N", "H + 2 Hkv", "D")
    require.last_contiguous(qkv=qkv)
    num_tokens, _, dim = qkv.shape
    require.head_dim("qkv", dim)
    _check_caches(k_cache, v_cache, slot_mapping, "Hkv", dim)
    require.shape("v_cache", v_cache, *k_cache.shape)
    num_kv_heads = k_cache.shape[1]
    num_heads = check_prologue(qkv, weights, cos, sin, num_kv_heads)
    out = require.output(out, (num_tokens, num_heads, dim), qkv)
    if not num_tokens:
        return out
    rows = rows_of_program(dim)
    programs = cdiv(num_tokens * num_heads, rows)
    programs += 2 * cdiv(num_tokens * num_kv_heads, rows)
    strides = (*qkv.stride()[:2], cos.stride(0), sin.stride(0), *out.stride()[:2])
    _norm_rope_write[(programs,)](
        qkv, q_weight, k_weight, cos, sin, slot_mapping, out, k_cache, v_cache, eps, num_tokens,
        slot_mapping.shape[0], k_cache.shape[0], *strides, *k_cache.stride()[:3],
        *v_cache.stride()[:3], NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, DIM=dim,
        HALF=padded(dim) // 2, BLOCK_SIZE=k_cache.shape[2], ROWS=rows, INTERLEAVED=interleaved,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return out


def check_prologue(
    qkv: Tensor, weights: dict[str, Tensor | None], cos: Tensor, sin: Tensor, num_kv_heads: int
) -> int:
    """Check the norms' weights and the angles of qkv [N, H + 2 Hkv, D]; its query heads."""
    num_tokens, all_heads, dim = qkv.shape
    num_heads = all_heads - 2 * num_kv_heads
    if num_heads < 1:
        raise KernelError(
            f"qkv has {all_heads} heads and the caches {num_kv_heads} KV heads; qkv must have more "
            "than twice as many heads as the caches."
        )
    _check_angles(cos, sin, num_tokens, dim)
    if len({weight is None for weight in weights.values()}) == 2:
        raise KernelError("only one of q_weight and k_weight is given; give both or none.")
    for name, weight in weights.items():
        if weight is not None:
            require.shape(name, weight, dim)
            require.contiguous(**{name: weight})
    return num_heads
