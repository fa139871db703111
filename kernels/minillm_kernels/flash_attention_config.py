"""Argument checks and tile sizes of `flash_attention.flash_attention`.

Tile sizes come from a table by architecture, dtype and head dimensions only, so that a row's result
does not depend on the number of rows. The register file limits them: on Ampere and Hopper, a
program keeps its sums [BLOCK_M, Dv] and a tile of scores [BLOCK_M, BLOCK_N] in float32 registers.
8 warps have 256 registers per thread (64K in all); at Dv = 128 the two take half of them.
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

L2_BYTES = 32 * 2**20  # L2 cache for keys and values; an A100 has 40 MB in all, an H200 50


@dataclass(frozen=True)
class Config:
    """Tile sizes and load method of a call.

    Attributes:
        block_m: queries of a program.
        block_n: keys of a tile.
        num_warps: warps that compute; with specialisation, 4 become one group that copies and two
            groups that compute.
        num_stages: tiles of keys and of values in flight.
        descriptors: load tiles by bulk copies; half precision, sm_90 and newer.
        warp_specialize: use separate warps for copies; needs `descriptors`, helps on sm_90 only.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    warp_specialize: bool = False


# The interpreter's cost is per operation, not per number: a tile holds a whole test case.
INTERPRETED = Config(128, 128, 4, 2)
# Keyed by the largest padded head dimensions (of keys, of values) of an entry.
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
# For architectures with less shared memory (86, 89, 120: 99 KB), and for windows on Ampere, whose
# third loop needs registers.
SMALL: Table = MappingProxyType(
    {
        (64, 64): Config(128, 64, 8, 3),
        (128, 128): Config(128, 32, 8, 3),
        (256, 128): Config(128, 32, 8, 2),
        (256, 256): Config(64, 32, 8, 2),
    }
)
# Chosen by compiling (no spills, shared memory); not yet measured on a GPU.
HOPPER: Table = MappingProxyType(
    {
        (64, 64): Config(128, 128, 4, 3, descriptors=True, warp_specialize=True),
        (128, 128): Config(128, 128, 4, 2, descriptors=True, warp_specialize=True),
        (256, 256): Config(128, 64, 4, 2, descriptors=True, warp_specialize=True),
    }
)
# Without specialisation: for comparison, and in case a new compiler rejects it.
HOPPER_PLAIN: Table = MappingProxyType(
    {
        (128, 128): Config(128, 128, 8, 2, descriptors=True),
        (256, 256): Config(128, 64, 8, 2, descriptors=True),
    }
)
# With pointers, for comparison.
HOPPER_POINTERS: Table = MappingProxyType(
    {
        (64, 64): Config(128, 128, 8, 2),
        (256, 128): Config(128, 64, 8, 2),
        (256, 256): Config(64, 64, 8, 2),
    }
)
# Rows that are not aligned to 16 bytes are copied 4 bytes at a time, and the addresses fill the
# registers. No model has such rows; these entries are for correctness only.
UNALIGNED: Table = MappingProxyType(
    {
        (64, 64): Config(64, 64, 8, 2),
        (128, 128): Config(64, 32, 8, 2),
        (256, 256): Config(32, 16, 8, 2),
    }
)


def config_of(config: Config | None, q: Tensor, k: Tensor, v: Tensor, windowed: bool) -> Config:
    """The given configuration, after checking that the tensors support it, else the table's."""
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
    """The configuration of a call; `bulk_copies` is the result of `describable`."""
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
    """Whether bulk copies support all of these tensors [rows, heads, dims].

    Addresses and strides must be multiples of 16 bytes, and there must be at least one row.
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
    """Number of KV heads that programs process at a time, so that their data stays in the L2 cache.

    All heads if they fit; then the longest rows of all heads start first, which balances the end.
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
    """Check arguments without waiting for the GPU; raises KernelError."""
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
