"""The CPU backend: the C functions of `c/`, with the signatures of `minillm_kernels.reference`.

`takes` says whether C supports a tensor; otherwise the torch reference is used. Arguments that
could make C access memory outside a tensor are checked here or in C, and raise an exception.
"""

import os
from ctypes import c_int64
from functools import cache

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.ops import dispatch
from minillm.ops.batch import Batch, Pages
from minillm.ops.c_library import Element, Library, NoLibrary, library
from minillm.ops.cpu_checks import check, check_integers, check_rope, check_tables, check_vector
from minillm.ops.cpu_structures import address
from minillm.ops.cpu_tails import tails_in_c

ELEMENTS: tuple[tuple[torch.dtype, Element], ...] = (
    (torch.bfloat16, "BF16"),
    (torch.float32, "F32"),
)
LANES = 16  # head sizes are multiples of this
MOST_HEAD_DIM = 512  # limit of norm_rope_write; as in common.h
MOST_GROUP = 256  # query heads per KV head: decode.c has 64 floats of each on the stack
MOST_DIM = 4096  # head size in attention; also on the stack
PANEL_STEP, MOST_INPUTS = 32, 2**18  # inputs of panels: a multiple, and COPY_WORDS of linear.c
PANELS = "MINILLM_PANELS"  # 1: weights in panels whenever C is available, 0: never
UNITS = ("plain C", "AVX2", "AVX-512", "AVX-512 BF16", "AMX", "NEON BF16")  # of `panel_unit`


@cache
def functions(dtype: torch.dtype) -> Library | None:
    """The functions for tensors of this dtype; None if there are none."""
    element = dict(ELEMENTS).get(dtype)
    built = None if element is None else library(element)
    return built if isinstance(built, Library) else None


def describe(dtype: torch.dtype) -> str:
    """Describe the implementation of operations with this dtype."""
    built = library(dict(ELEMENTS)[dtype]) if dtype in dict(ELEMENTS) else NoLibrary("its type")
    if isinstance(built, NoLibrary):
        return f"plain torch: {built}"
    found = functions(dtype)
    if found is None or not panels_are_fast(dtype):
        return "C functions of our own"
    return f"C functions of our own, {UNITS[found.panel_unit()]} products"


def takes(x: Tensor, *others: Tensor | None) -> bool:
    """Whether these tensors go to C.

    Not if a gradient is required, under autocast, or while torch operations are intercepted (for
    counting or tracing).
    """
    if x.device.type != "cpu" or functions(x.dtype) is None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    if any(tensor is not None and tensor.dtype != x.dtype for tensor in others):
        return False
    if not torch.is_grad_enabled():
        return True
    return not any(tensor is not None and tensor.requires_grad for tensor in (x, *others))


def ready(dtype: torch.dtype) -> Library:
    """The functions for tensors of this dtype, set to torch's number of threads."""
    if (compiled := functions(dtype)) is None:
        raise RuntimeError(f"there are no C functions for {dtype}; check `takes` first.")
    compiled.threads.follow_torch()
    return compiled


# ---- rows --------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[.., d] -> [.., d]"""
    d = x.shape[-1]
    x, weight = x.contiguous(), weight.contiguous()
    check(weight.shape == (d,), "weight", weight, f"[{d}]")
    out = torch.empty_like(x)
    run = ready(x.dtype).rms_norm
    run(x.data_ptr(), d, weight.data_ptr(), out.data_ptr(), x.numel() // max(d, 1), d, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[N, d], [N, d] -> norm of the sum, and the sum."""
    d = x.shape[-1]
    check(weight.shape == (d,), "weight", weight, f"[{d}]")
    check(residual.shape == x.shape, "residual", residual, str(list(x.shape)))
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    ready(x.dtype).add_rms_norm(
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
        x.numel() // max(d, 1),
        d,
        eps,
    )
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """[N, 2 I] -> [N, I]"""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    check(gate_up.shape[-1] == 2 * size, "gate_up", gate_up, "[.., 2 I]")
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    where = gate_up.data_ptr(), out.data_ptr()
    ready(out.dtype).silu_mul(*where, out.numel() // max(size, 1), size)
    return out


def cos_sin(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """int64 [N], float32 [D / 2] -> cos and sin times `factor`, float32 [N, D / 2] each.

    One thread: torch computes cosines with several, even for one position. These spin for a while
    afterwards and take processor time from the threads of the next C function.
    """
    positions, frequencies = positions.long().contiguous(), frequencies.contiguous()
    count, half = len(positions), len(frequencies)
    check_integers("positions", positions, torch.int64)
    check_vector("frequencies", frequencies, half, torch.float32)
    cos, sin = torch.empty(count, half), torch.empty(count, half)
    given = positions.data_ptr(), frequencies.data_ptr()
    ready(torch.float32).cos_sin(*given, factor, cos.data_ptr(), sin.data_ptr(), count, half)
    return cos, sin


def takes_heads(cache: Tensor) -> bool:
    """Whether `norm_rope_write` supports the head size of a cache [.., D]."""
    dim = cache.shape[-1]
    return dim % 2 == 0 and dim <= MOST_HEAD_DIM


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
) -> Tensor:
    """[N, H + 2 Hkv, D] -> query [N, H, D]. Keys and values are written to the cache."""
    count, rows, d = qkv.shape
    num_blocks, kv_heads, block_size, _ = k_cache.shape
    heads = rows - 2 * kv_heads
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    check_rope((cos, sin), count, d)
    check(d <= MOST_HEAD_DIM and d % 2 == 0, "qkv", qkv, f"[.., .., an even D <= {MOST_HEAD_DIM}]")
    check(k_cache.shape[3] == d, "k_cache", k_cache, f"[.., .., .., {d}]")
    check(k_cache.shape == v_cache.shape, "v_cache", v_cache, str(list(k_cache.shape)))
    check(k_cache.stride() == v_cache.stride(), "v_cache", v_cache, "strided like k_cache")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        check(tensor.dtype == qkv.dtype, name, tensor, f"{qkv.dtype}")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_vector(name, weight, d, qkv.dtype)
    check_integers("slot_mapping", slot_mapping, torch.int64)
    check(k_cache.stride()[2:] == (d, 1), "k_cache", k_cache, "of contiguous rows")
    both = q_weight is not None and k_weight is not None
    q = qkv.new_empty(count, heads, d)
    wrong = ready(qkv.dtype).norm_rope_write(
        qkv.data_ptr(),
        q_weight.data_ptr() if both and q_weight is not None else None,
        k_weight.data_ptr() if both and k_weight is not None else None,
        eps, cos.data_ptr(), sin.data_ptr(), interleaved,
        k_cache.data_ptr(), v_cache.data_ptr(), k_cache.stride(0), k_cache.stride(1), block_size,
        slot_mapping.data_ptr(), len(slot_mapping),
        q.data_ptr(), count, heads, kv_heads, d, num_blocks * block_size,
    )  # fmt: skip
    raise_for(3 if wrong else 0, k_cache, count)
    return q


# ---- attention ---------------------------------------------------------------------------------


def fits_vectors(group: int, dim: int, value_dim: int) -> bool:
    """Whether attention in C supports `group` query heads per KV head and these head sizes."""
    if dim % LANES or value_dim % LANES:
        return False
    return group <= MOST_GROUP and max(dim, value_dim) <= MOST_DIM


def takes_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether `paged_attention` supports these: head sizes that are whole vectors, contiguous rows,
    and groups of query heads that fit on a thread's stack."""
    group = q.shape[1] // k_cache.shape[1]
    return (
        fits_vectors(group, q.shape[2], v_cache.shape[3])
        and k_cache.stride(3) == v_cache.stride(3) == 1
        and takes(q, k_cache, v_cache)
    )


def paged_attention(
    q: Tensor, pages: Pages, batch: Batch, scale: float, window: int | None = None
) -> Tensor:
    """[N, H, D] -> [N, H, Dv]. With a small `max_query_len`, only the decode kernel is called."""
    k_cache, v_cache, block_tables = pages.key, pages.value, batch.block_tables
    query_start, seq_lens = batch.query_start.contiguous(), batch.seq_lens.contiguous()
    q = q.contiguous()
    count, heads, d = q.shape
    num_blocks, kv_heads, block_size, dv = v_cache.shape
    sequences, columns = block_tables.shape
    due = [num_blocks, kv_heads, block_size, d]
    check(list(k_cache.shape) == due, "k_cache", k_cache, f"{due}")
    check(heads % kv_heads == 0, "q", q, f"[N, a multiple of {kv_heads}, D]")
    if block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    check_tables(query_start, seq_lens, block_tables)
    check(fits_vectors(heads // kv_heads, d, dv), "q", q, f"[.., a multiple of {LANES}]")
    compiled = ready(q.dtype)
    out = q.new_empty(count, heads, dv)
    strides = (c_int64 * 6)(*k_cache.stride()[:3], *v_cache.stride()[:3])
    arguments = (
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), strides, block_size,
        query_start.data_ptr(), seq_lens.data_ptr(),
        block_tables.data_ptr(), block_tables.stride(0), scale, window or 0, out.data_ptr(),
        sequences, heads, kv_heads, d, dv,
    )  # fmt: skip
    # The first call validates the tables for both.
    tree = tails_in_c(batch.tails, len(seq_lens))
    status = compiled.decode_attention(*arguments, count, num_blocks, columns, address(tree))
    few = compiled.decode_queries(heads // kv_heads)
    if not status and batch.max_query_len > few:
        status = compiled.prefill_attention(*arguments, few + 1)
    raise_for(status, k_cache, count)
    return out


def raise_for(status: int, cache: Tensor, num_queries: int) -> None:
    """Raise the exception for a status of the C functions; 0 is success."""
    num_blocks, _, block_size, _ = cache.shape
    if status == 1:
        raise MemoryError("Out of memory for the intermediate results of attention.")
    if status == 2:
        raise IndexError(
            f"block_tables or query_start point outside the cache ({num_blocks} blocks of "
            f"{block_size}) or the queries ({num_queries})."
        )
    if status:
        raise IndexError(f"A slot is outside the cache, which has {num_blocks * block_size}.")


# ---- weights in panels -------------------------------------------------------------------------


def panels_are_fast(dtype: torch.dtype) -> bool:
    """Whether weights are stored in panels: with AVX2 or better, unless MINILLM_PANELS is set."""
    compiled, setting = functions(dtype), panels_setting()
    return compiled is not None and (setting == "1" if setting else compiled.panel_unit() > 0)


def panels_setting() -> str:
    """The environment variable `MINILLM_PANELS`: "1" always, "0" never, "" if not set.

    Raises:
        ConfigError: `MINILLM_PANELS` is neither 0 nor 1.
    """
    setting = os.environ.get(PANELS, "")
    if setting not in ("", "0", "1"):
        raise ConfigError(f"{PANELS} is {setting!r}; it must be 0 (never), 1 (always) or not set.")
    return setting


def takes_panels(weight: Tensor) -> bool:
    """Whether to store a weight [out, in] in panels."""
    if weight.shape[1] % PANEL_STEP or not 0 < weight.shape[1] <= MOST_INPUTS:
        return False
    return dispatch.backend_of(weight.device).name == "cpu" and panels_are_fast(weight.dtype)


def pack_panels(weight: Tensor, panels: Tensor) -> None:
    """[out, in] -> [ceil(out / 32), in / 2, 32, 2]; float32: [.., in, 32] in the same memory."""
    size, shape = weight.shape[1], panels_shape(*weight.shape)
    fits = size % PANEL_STEP == 0 and size <= MOST_INPUTS and weight.device.type == "cpu"
    check(fits, "weight", weight, f"[.., a multiple of {PANEL_STEP}] on the CPU")
    right = panels.shape == shape and panels.dtype == weight.dtype and panels.is_contiguous()
    check(right, "panels", panels, f"contiguous {list(shape)}, {weight.dtype}")
    weight = weight.contiguous()
    ready(weight.dtype).pack_panels(weight.data_ptr(), panels.data_ptr(), *weight.shape)


def panels_shape(out_features: int, in_features: int) -> tuple[int, int, int, int]:
    """The shape of a weight in panels."""
    return -(-out_features // 32), in_features // 2, 32, 2


def panel_linear(x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """[N, in], panels, [out] -> [N, out]"""
    x = x.contiguous()
    count, size = x.shape
    check(panels.shape == panels_shape(out_features, size), "x", x, f"[N, {2 * panels.shape[1]}]")
    check(x.dtype == panels.dtype, "x", x, f"{panels.dtype}")
    if bias is not None:
        check_vector("bias", bias, out_features, x.dtype)
    out = x.new_empty(count, out_features)
    where = x.data_ptr(), panels.data_ptr(), None if bias is None else bias.data_ptr()
    ready(x.dtype).panel_product(*where, out.data_ptr(), count, size, out_features, 0)
    return out


def rows_of_panels(panels: Tensor, ids: Tensor, out_features: int) -> Tensor:
    """Rows [N, in] of a weight in panels, for embedding lookup."""
    if not takes(panels):  # torch operations are intercepted
        pair = 2 if panels.dtype == torch.bfloat16 else 1
        return panels.view(len(panels), -1, 32, pair)[ids // 32, :, ids % 32].flatten(1)
    ids = ids.contiguous()
    check_integers("ids", ids, torch.int64)
    check(len(panels) == -(-out_features // 32), "panels", panels, f"of {out_features} outputs")
    size = 2 * panels.shape[1]
    out = panels.new_empty(len(ids), size)
    where = panels.data_ptr(), ids.data_ptr(), out.data_ptr()
    if ready(panels.dtype).panel_rows(*where, len(ids), size, out_features):
        raise IndexError(f"A token id is outside of 0 to {out_features - 1}.")
    return out
