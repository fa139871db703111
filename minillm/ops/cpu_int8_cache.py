"""A KV cache of 8-bit codes in C (`c/int8_cache.c`)."""

from ctypes import byref
from dataclasses import dataclass

from torch import Tensor

from minillm.ops import cpu
from minillm.ops.batch import Batch, Codes, Prologue
from minillm.ops.cpu_checks import check, check_integers, check_rope, check_tables, check_vector
from minillm.ops.cpu_structures import address, filled
from minillm.ops.cpu_tails import tails_in_c


@dataclass(frozen=True)
class Int8Pages:
    """The pages of one layer (`int8_pages` of int8_cache.h)."""

    key: Tensor
    value: Tensor
    key_scale: Tensor
    value_scale: Tensor
    num_blocks: int
    block_size: int

    @classmethod
    def of(cls, key: Tensor, value: Tensor, key_scale: Tensor, value_scale: Tensor) -> "Int8Pages":
        """Those of these tensors, which C takes to be contiguous."""
        for name, tensor in (
            ("value", value),
            ("key_scale", key_scale),
            ("value_scale", value_scale),
        ):
            due = key.shape[: tensor.dim()]
            check(tensor.shape == due and tensor.is_contiguous(), name, tensor, f"contiguous {due}")
        check(key.is_contiguous() and key.shape[2] % 4 == 0, "key", key, "[.., .., 4 n, ..]")
        return cls(key, value, key_scale, value_scale, key.shape[0], key.shape[2])


def takes(x: Tensor, codes: Codes) -> bool:
    """Whether C supports heads x [N, H, D] with these pages."""
    group, dim = x.shape[1] // codes[0].shape[1], x.shape[2]
    return cpu.fits_vectors(group, dim, dim) and dim <= cpu.MOST_HEAD_DIM and cpu.takes(x)


def norm_rope_write(
    qkv: Tensor, prologue: Prologue, rope: tuple[Tensor, Tensor], codes: Codes, slot_mapping: Tensor
) -> Tensor:
    """`ops.norm_rope_write`: [N, H + 2 Hkv, D] -> query [N, H, D]; keys and values are stored."""
    count, rows, d = qkv.shape
    kv_heads, pages = codes[0].shape[1], filled(Int8Pages.of(*codes))
    qkv, cos, sin = qkv.contiguous(), rope[0].contiguous(), rope[1].contiguous()
    check_rope((cos, sin), count, d)
    check(codes[0].shape[3] == d, "qkv", qkv, f"[.., .., {codes[0].shape[3]}]")
    check_integers("slot_mapping", slot_mapping, slot_mapping.long().dtype)
    norms = [norm for norm in (prologue.q_norm, prologue.k_norm) if norm is not None]
    for weight in norms:
        check_vector("a norm", weight, d, qkv.dtype)
    addresses = [norm.data_ptr() for norm in norms] if len(norms) == 2 else [None, None]
    q = qkv.new_empty(count, rows - 2 * kv_heads, d)
    wrong = cpu.ready(qkv.dtype).norm_rope_write_int8(
        qkv.data_ptr(), *addresses, prologue.eps, cos.data_ptr(), sin.data_ptr(),
        prologue.interleaved, byref(pages), slot_mapping.data_ptr(), len(slot_mapping),
        q.data_ptr(), count, rows - 2 * kv_heads, kv_heads, d,
    )  # fmt: skip
    cpu.raise_for(3 if wrong else 0, codes[0], count)
    return q


def paged_attention(
    q: Tensor, codes: Codes, batch: Batch, scale: float, window: int | None = None
) -> Tensor:
    """`ops.paged_attention`: [N, H, D] -> [N, H, D]"""
    pages, tables, q = filled(Int8Pages.of(*codes)), batch.block_tables, q.contiguous()
    query_start, seq_lens = batch.query_start.contiguous(), batch.seq_lens.contiguous()
    if tables.stride(1) != 1:
        tables = tables.contiguous()
    check_tables(query_start, seq_lens, tables)
    count, heads, d = q.shape
    kv_heads = codes[0].shape[1]
    right = heads % kv_heads == 0 and codes[0].shape[3] == d
    check(right, "q", q, f"[N, a multiple of {kv_heads}, {codes[0].shape[3]}]")
    out, tree = q.new_empty(q.shape), tails_in_c(batch.tails, len(seq_lens))
    status = cpu.ready(q.dtype).int8_attention(
        q.data_ptr(), byref(pages), query_start.data_ptr(), seq_lens.data_ptr(), tables.data_ptr(),
        tables.stride(0), scale, window or 0, out.data_ptr(), *tables.shape[:1], heads, kv_heads, d,
        count, tables.shape[1], address(tree),
    )  # fmt: skip
    cpu.raise_for(status, codes[0], count)
    return out
