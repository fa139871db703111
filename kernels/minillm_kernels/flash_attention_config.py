"""What a call of `flash_attention.flash_attention` must be, and how it is cut.

A table by architecture, dtype and head dimensions, and by nothing else: a row's result must not
depend on how many rows come with it. What decides is the register file. A program of Ampere and
Hopper keeps its sums [BLOCK_M, Dv] and a tile of scores [BLOCK_M, BLOCK_N] in registers, in
float32, of which 8 warps have 256 per thread (64K in all): at Dv = 128 the two take half of that.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from minillm_kernels.launch import (
    KernelError,
    arch,
    check_contiguous,
    check_device,
    check_dtype,
    check_groups,
    check_head_dim,
    check_last_contiguous,
    check_same_dtype,
    check_shape,
    check_starts,
    padded,
)

L2_BYTES = 32 * 2**20  # of keys and values; an A100 has 40 MB of cache, an H200 50


@dataclass(frozen=True)
class Config:
    """How a call is cut.

    Attributes:
        block_m: queries of a program.
        block_n: keys of a tile.
        num_warps: that compute; specialisation makes of 4 one group that copies and two that do.
        num_stages: tiles of keys and of values in flight.
        descriptors: tiles by bulk copies; half precision, sm_90 and newer.
        warp_specialize: copies in warps of their own; needs `descriptors`, helps on sm_90 only.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    warp_specialize: bool = False


# The interpreter pays for operations, not for numbers: tiles that hold a whole test.
INTERPRETED = Config(128, 128, 4, 2)
# By the largest padded head dimensions (of keys, of values) that they are meant for.
Table = Mapping[tuple[int, int], Config]
FLOAT32: Table = MappingProxyType(
    {
        (64, 64): Config(32, 32, 4, 2),
        (128, 128): Config(32, 64, 8, 2),
        (256, 256): Config(16, 32, 4, 2),
    }
)
AMPERE: Table = MappingProxyType(
    {
        (64, 64): Config(128, 64, 4, 3),
        (128, 128): Config(128, 64, 8, 3),
        (256, 128): Config(128, 32, 8, 3),
        (256, 256): Config(64, 64, 8, 2),
    }
)
# Where there is less shared memory (86, 89, 120: 99 KB), and on Ampere for windows, whose third
# loop takes registers.
SMALL: Table = MappingProxyType(
    {
        (64, 64): Config(128, 64, 8, 3),
        (128, 128): Config(128, 32, 8, 3),
        (256, 128): Config(128, 32, 8, 2),
        (256, 256): Config(64, 32, 8, 2),
    }
)
# Chosen by what the compiler made of them (no spills, shared memory); no GPU has measured them yet.
HOPPER: Table = MappingProxyType(
    {
        (64, 64): Config(128, 128, 4, 3, descriptors=True, warp_specialize=True),
        (128, 128): Config(128, 128, 4, 2, descriptors=True, warp_specialize=True),
        (256, 256): Config(128, 64, 4, 2, descriptors=True, warp_specialize=True),
    }
)
# The same without specialisation: for comparison, and if a new compiler refuses it.
HOPPER_PLAIN: Table = MappingProxyType(
    {
        (128, 128): Config(128, 128, 8, 2, descriptors=True),
        (256, 256): Config(128, 64, 8, 2, descriptors=True),
    }
)
# The same by pointers, for comparison.
HOPPER_POINTERS: Table = MappingProxyType(
    {
        (64, 64): Config(128, 128, 8, 2),
        (256, 128): Config(128, 64, 8, 2),
        (256, 256): Config(64, 64, 8, 2),
    }
)
# Rows that do not begin at multiples of 16 bytes are copied 4 bytes at a time, by addresses that
# fill the registers. No model has them; these are only to be right.
UNALIGNED: Table = MappingProxyType(
    {
        (64, 64): Config(64, 64, 8, 2),
        (128, 128): Config(64, 32, 8, 2),
        (256, 256): Config(32, 16, 8, 2),
    }
)


def config_of(config: Config | None, q: Tensor, k: Tensor, v: Tensor, windowed: bool) -> Config:
    """The configuration that was asked for, if these tensors can have it; else the table's."""
    bulk_copies = describable(q, k, v)
    if config is None:
        return choose_config(arch(), q.dtype, q.shape[2], v.shape[2], bulk_copies, windowed)
    if config.descriptors and not bulk_copies:
        raise KernelError(
            "descriptors need half precision, addresses and strides that are multiples of 16 "
            "bytes, and at least one key; choose a config without them."
        )
    return config


def choose_config(
    capability: int,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    bulk_copies: bool,
    windowed: bool = False,
) -> Config:
    """The first entry of a table that is wide enough; `bulk_copies` as `describable` says."""
    if capability == 0:
        return INTERPRETED
    if dtype == torch.float32:
        table = FLOAT32
    elif not bulk_copies:
        table = UNALIGNED
    elif capability in (90, 100):
        table = HOPPER if capability == 90 else HOPPER_PLAIN
    else:
        table = AMPERE if capability == 80 and not windowed else SMALL
    return entry(table, head_dim, value_dim)


def entry(table: Table, head_dim: int, value_dim: int | None = None) -> Config:
    """The first configuration of a table that is wide enough."""
    block_d, block_dv = padded(head_dim), padded(value_dim or head_dim)
    return next(
        config for widest, config in table.items() if block_d <= widest[0] and block_dv <= widest[1]
    )


def describable(*tensors: Tensor) -> bool:
    """Whether bulk copies can take all of these [rows, heads, dims].

    Hardware wants addresses and strides that are multiples of 16 bytes, and at least one row.
    """
    return all(
        tensor.element_size() == 2
        and tensor.numel() > 0
        and tensor.data_ptr() % 16 == 0
        and tensor.stride(0) % 8 == 0
        and tensor.stride(1) % 8 == 0
        for tensor in tensors
    )


def kv_heads_at_once(num_kv_heads: int, head_bytes: int) -> int:
    """On how many KV heads programs work at a time, so that what they share stays in the cache.

    All of them if they fit; then the longest rows of all heads come first, which ends better.
    """
    most = max(1, L2_BYTES // max(1, head_bytes))
    return max(n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0 and n <= most)


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Whatever can be known without waiting for the GPU (KernelError)."""
    check_device(q=q, k=k, v=v, query_start=query_start, key_start=key_start)
    check_same_dtype(q=q, k=k, v=v)
    check_dtype((torch.int32,), query_start=query_start, key_start=key_start)
    check_shape("q", q, "N", "H", "D")
    check_shape("k", k, "S", "Hkv", q.shape[2])
    check_shape("v", v, k.shape[0], k.shape[1], "Dv")
    check_shape("query_start", query_start, "B + 1")
    check_shape("key_start", key_start, len(query_start))
    if not len(query_start):
        raise KernelError("query_start is empty; it must be [B + 1] and begin with 0.")
    check_last_contiguous(q=q, k=k, v=v)
    check_contiguous(query_start=query_start, key_start=key_start)
    check_starts("query_start", query_start, q.shape[0])
    check_starts("key_start", key_start, k.shape[0])
    check_head_dim("q", q.shape[2])
    check_head_dim("v", v.shape[2])
    check_groups(q.shape[1], k.shape[1])
    if not 0 < scale < math.inf:
        raise KernelError(f"scale is {scale}; it must be above 0 and finite.")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise KernelError(f"soft_cap is {soft_cap}; it must be above 0 and finite, or None.")
    if window is not None and (window < 1 or not causal):
        raise KernelError(
            f"window is {window} and causal {causal}; a window is at least 1, and causal."
        )
