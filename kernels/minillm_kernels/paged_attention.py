"""Attention over a paged KV cache (PagedAttention: Kwon et al., 2023).

The keys and values of a sequence are stored in blocks of 1 to 256 positions of one large cache
[blocks, Hkv, block_size, D]; its block table lists them. Blocks are head-major, so a page of one
head is contiguous and can be loaded by a single bulk copy on Hopper. A batch is flat: N query rows
of B sequences, each decoding (one query, or a few drafts to verify) or in a prefill chunk (many).
The host uses only shapes, so there is no synchronisation, and grids are constant, as CUDA graphs
require.

* **Decode** (paged_decode.py) reads each key and value once: 2 S Hkv D numbers per sequence of S
  positions, for 4 S H D operations, in half precision G = H / Hkv operations per byte. A GPU is
  compute-bound from about 200, so decode is memory-bound. Llama-3.1-8B, batch 64, context 4,096:
  1.07 GB a layer. The partial results of splits are 4 (D + 2) bytes for each row, head and split,
  written and read once. Several queries of a sequence also read its keys once.
* **Prefill** (paged_prefill.py) of T rows after P cached positions does 4 H D (T P + T^2 / 2)
  operations on 2 (P + T) Hkv D numbers: from a few hundred rows on it is compute-bound.
* **Batch-invariant** calls use `invariant_kernel` of paged_prefill.py for every row; see
  `_invariant`.

Pages of 8 bits: int8_pages.py.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import paged_decode, paged_parts, paged_prefill, require
from minillm_kernels.launch import (
    KernelError,
    Tails,
    TensorDescriptor,
    arch,
    arrival_counters,
    num_multiprocessors,
    padded,
)
from minillm_kernels.paged_config import FEW, Config, Tiles, choose, count_splits

LOG2_E = 1.4426950408889634
MAX_GROUP = 128  # query heads that share a KV head
MAX_BLOCK_SIZE = 256
MAX_GRID_Z = 65_535  # programs along a launch's third dimension
MAX_WORKSPACE = 2**26  # numbers of partial results in the batch-invariant mode


@dataclass(frozen=True)
class _Call:
    """A checked call: the arguments shared by its launches."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    out: Tensor
    scale: float
    window: int | None
    soft_cap: float | None
    config: Config
    tails: Tails | None

    @property
    def num_sequences(self) -> int:
        return self.seq_lens.shape[0]  # len() of a tensor takes three times as long

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.shape[1]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.num_kv_heads

    @property
    def most_positions(self) -> int:
        """Upper bound of all lengths: the capacity of a block table."""
        return self.block_tables.shape[1] * self.k_cache.shape[2]

    def exponents(self) -> tuple[float, float, int]:
        """`scale`, `soft_cap` and `window` in the form that `log2_scores` needs."""
        window = min(self.window or 0, 2**31 - 1 - FEW)  # positions are int32 numbers
        if self.soft_cap is None:
            return self.scale * LOG2_E, 0.0, window
        return 2 * self.scale * LOG2_E / self.soft_cap, self.soft_cap * LOG2_E, window

    def constants(self, tiles: Tiles, wide: bool = False) -> dict[str, Any]:
        """Compile-time constants of the attention kernels; `wide` tiles use more warps."""
        head_dim, value_dim = self.q.shape[2], self.v_cache.shape[3]
        return {
            "GROUP": self.group,
            "NUM_KV_HEADS": self.num_kv_heads,
            "BLOCK_SIZE": self.k_cache.shape[2],
            "BLOCK_N": tiles.block_n,
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "BLOCK_D": padded(head_dim),
            "BLOCK_DV": padded(value_dim),
            "HAS_WINDOW": self.window is not None,
            "HAS_CAP": self.soft_cap is not None,
            "BULK": self.bulk(tiles),
            "num_warps": max(tiles.num_warps, 8) if wide else tiles.num_warps,
            "num_stages": tiles.num_stages,
        }

    def bulk(self, tiles: Tiles) -> bool:
        """Whether each KV tile is contiguous and can be loaded by a descriptor."""
        whole = tiles.bulk and self.k_cache.shape[2] % tiles.block_n == 0
        return whole and self.tails is None and self.describable

    @cached_property
    def describable(self) -> bool:
        """Whether both caches can have a descriptor of [blocks * Hkv * block_size, D]."""
        k, v = self.k_cache, self.v_cache
        return (
            0 < self.num_cache_rows < 2**31
            and k.is_contiguous()
            and v.is_contiguous()
            and not (k.data_ptr() | v.data_ptr()) % 16
        )

    @property
    def num_cache_rows(self) -> int:
        """Positions of all blocks and heads."""
        return math.prod(self.k_cache.shape[:3])

    def caches(self, tiles: Tiles) -> tuple[Any, Any]:
        """K and V as pointers, or as descriptors of [blocks * Hkv * block_size, D]."""
        if not self.bulk(tiles):
            return self.k_cache, self.v_cache

        def described(cache: Tensor) -> TensorDescriptor:
            shape = [self.num_cache_rows, cache.shape[3]]
            return TensorDescriptor(cache, shape, [shape[1], 1], [tiles.block_n, padded(shape[1])])

        return described(self.k_cache), described(self.v_cache)

    def strides(self) -> tuple[Any, ...]:
        """Strides of q, both caches, the output and the tables, without the last dimension."""
        return (
            self.q.stride()[:-1],
            self.k_cache.stride()[:-1],
            self.v_cache.stride()[:-1],
            self.out.stride()[:-1],
            self.block_tables.stride(0),
        )

    def workspace(self, few: int, splits: int) -> tuple[Tensor, Tensor]:
        """Weighted values [B, few, H, splits, Dv]; maximum and sum of weights [.., splits, 2]."""
        shape = (self.num_sequences, few, self.out.shape[1], splits)
        return (
            self.q.new_empty((*shape, self.out.shape[2]), dtype=torch.float32),
            self.q.new_empty((*shape, 2), dtype=torch.float32),
        )


def _decode(call: _Call, few: int, block_m: int) -> None:
    """Launch decoding of sequences of up to `few` query rows, with tiles of `block_m` rows."""
    tiles, config = call.config.decode, call.config
    block_q = block_m // call.group
    num_tiles = call.num_sequences * -(-few // block_q)
    programs = num_tiles * call.num_kv_heads
    most_tiles = -(-call.most_positions // tiles.block_n)
    splits = config.splits or count_splits(
        programs, most_tiles, num_multiprocessors(call.q.device), config.min_split_tiles
    )
    partial, stats = call.workspace(few, splits) if splits > 1 else (call.out, call.out)
    arrivals = arrival_counters(call.q.device, padded(programs if splits > 1 else 1, 256))
    scale, soft_cap, window = call.exponents()
    paged_decode.decode_kernel[(num_tiles, call.num_kv_heads, splits)](
        call.q, *call.caches(tiles), call.out, partial, stats, arrivals, call.query_start,
        call.seq_lens, call.block_tables, *require.tail_arguments(call.tails, call.num_sequences),
        *call.strides(), scale, soft_cap, window, few, splits,
        BLOCK_M=block_m, BLOCK_Q=block_q, MIN_TILES=config.min_split_tiles, SWAP=tiles.swap,
        SPLIT=splits > 1, SEVERAL=few > 1,
        **call.constants(tiles, wide=few > 1 and block_m >= tiles.block_m),
    )  # fmt: skip


def _decode_rows(call: _Call, max_query_len: int | None) -> tuple[int, int]:
    """The most query rows of a decode sequence, and the rows x heads of its tile.

    In a batch without prefill chunks, a tile fits all queries of a sequence. Otherwise it is the
    tile of a single query, whose padding also fits a few queries.
    """
    tiles = call.config.decode
    least = tiles.least_heads if tiles.swap else 16
    one = padded(call.group, least)
    if max_query_len is None or max_query_len > FEW:
        return min(one // call.group, FEW), one
    rows = padded(call.group * max_query_len, least)
    return max_query_len, max(one, min(rows, tiles.block_m))


def _combine(call: _Call, tiles: Tiles, partial: Tensor, stats: Tensor, split_tiles: int) -> None:
    """Launch the merge of the splits of every decode row."""
    value_dim, (_, few, _, splits, _) = call.out.shape[2], stats.shape
    paged_parts.combine_kernel[(call.num_sequences * few, call.q.shape[1])](
        partial, stats, call.out, call.query_start, call.seq_lens, call.out.stride()[:-1],
        call.exponents()[2], few, splits, VALUE_DIM=value_dim, BLOCK_DV=padded(value_dim),
        BLOCK_N=tiles.block_n, SPLIT_TILES=split_tiles, HAS_WINDOW=call.window is not None,
        num_warps=4,
    )  # fmt: skip


def _prefill(call: _Call, few: int) -> None:
    """Launch prefill of sequences with more than `few` query rows."""
    tiles = call.config.prefill
    block_m = max(tiles.block_m, padded(call.group))
    block_q = block_m // call.group
    num_tiles = call.q.shape[0] // block_q + call.num_sequences
    paged_prefill.prefill_kernel[(num_tiles, call.num_kv_heads)](
        call.q, *call.caches(tiles), call.out, call.query_start, call.seq_lens, call.block_tables,
        *call.strides(), *call.exponents(), call.num_sequences, few,
        BLOCK_M=block_m, BLOCK_Q=block_q, **call.constants(tiles),
    )  # fmt: skip


def _invariant(call: _Call, max_query_len: int | None) -> None:
    """Launch the batch-invariant mode: a row's bits depend only on its query, position and keys.

    * One kernel with one tile shape, `block_m` rows x `block_n` keys, for all query lengths; a
      row's sums do not depend on its place in the tile or on the other rows.
    * Keys are divided at multiples of `block_n` and `split_size` positions, counted from 0. A tile
      that is visible only to other rows has weights 0 for this row: it adds 0 to the row's sums and
      multiplies them by exp2(0) = 1, both exact.
    * Splits are merged in ascending order by one function (`merge`) with explicit multiply-adds, in
      registers or, if a few rows of few sequences would not fill the GPU, by `combine_kernel`.
    """
    tiles, config = call.config.invariant, call.config
    block_m = max(tiles.block_m, padded(call.group))
    block_q = block_m // call.group
    num_tiles = call.q.shape[0] // block_q + call.num_sequences + 1
    splits = -(-call.most_positions // config.split_size)
    programs = call.num_sequences * call.num_kv_heads
    idle = programs < 2 * num_multiprocessors(call.q.device)
    wanted = idle if config.splits is None else config.splits > 1
    few = max_query_len if max_query_len is not None and max_query_len <= FEW else 0
    room = few * splits * call.num_sequences * math.prod(call.out.shape[1:])
    apart = wanted and 0 < room <= MAX_WORKSPACE and 1 < splits <= MAX_GRID_Z
    partial, stats = call.workspace(few, splits if apart else 0)  # of one dtype: one machine code
    paged_prefill.invariant_kernel[(num_tiles, call.num_kv_heads, splits if apart else 1)](
        call.q, *call.caches(tiles), call.out, partial, stats, call.query_start, call.seq_lens,
        call.block_tables, *call.strides(), *call.exponents(), call.num_sequences, call.q.shape[0],
        splits, few if apart else 0, BLOCK_M=block_m, BLOCK_Q=block_q,
        SPLIT_TILES=config.split_size // tiles.block_n, **call.constants(tiles),
    )  # fmt: skip
    if apart:
        split_tiles = config.split_size // tiles.block_n
        _combine(call, tiles, partial, stats, split_tiles)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
) -> None:
    """Check all tensors, without synchronisation."""
    require.device(q=q, k_cache=k_cache, v_cache=v_cache)
    require.same_dtype(q=q, k_cache=k_cache, v_cache=v_cache)
    require.shape("q", q, "N", "H", "D")
    require.shape("k_cache", k_cache, "blocks", "Hkv", "block_size", q.shape[2])
    require.shape("v_cache", v_cache, *k_cache.shape[:3], "Dv")
    require.last_contiguous(q=q, k_cache=k_cache, v_cache=v_cache)
    require.head_dim("q", q.shape[2])
    require.head_dim("v_cache", v_cache.shape[3])
    if not 1 <= k_cache.shape[2] <= MAX_BLOCK_SIZE:
        raise KernelError(
            f"k_cache has blocks of {k_cache.shape[2]} positions; it must be 1 to {MAX_BLOCK_SIZE}."
        )
    if k_cache.shape[2] * max(k_cache.stride(2), v_cache.stride(2)) >= 2**31:
        raise KernelError(
            f"k_cache has strides {k_cache.stride()} and v_cache {v_cache.stride()}; the positions "
            "of a block must lie within 2^31 elements."
        )
    require.groups(q.shape[1], k_cache.shape[1], MAX_GROUP)
    require.sequences(q, k_cache, query_start, seq_lens, block_tables)


def _check_config(config: Config) -> None:
    tiles = config.invariant
    if config.split_size % tiles.block_n or config.split_size < tiles.block_n:
        raise KernelError(
            f"config.split_size is {config.split_size}; it must be a multiple of the invariant "
            f"kernel's block_n, {tiles.block_n}."
        )


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    *,
    max_query_len: int | None = None,
    batch_invariant: bool = False,
    tails: Tails | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """`reference.paged_attention` for a flat batch of decode rows and prefill chunks.

    `q` [N, H, D]; caches [blocks, Hkv, block_size, D or Dv], any strides but the last;
    `query_start` [B + 1], `seq_lens` [B], `block_tables` [B, M] int32 or int64. `max_query_len`,
    if given, is an upper bound of the query rows of a sequence; up to 16, only the decode kernel is
    launched. `tails` (launch.py), not with `batch_invariant`, gives the order of the last keys.
    Returns [N, H, Dv], in `out` if given; padding rows are not written, or 0 with
    `batch_invariant`. Raises KernelError for unsupported arguments.
    """
    _check(q, k_cache, v_cache, query_start, seq_lens, block_tables)
    require.attention(scale, window, soft_cap, max_query_len)
    out = require.output(out, (*q.shape[:2], v_cache.shape[3]), q)
    if config is None:
        largest = padded(max(q.shape[2], v_cache.shape[3]))
        config = choose(arch(), q.dtype, largest)
    else:
        _check_config(config)
    call = _Call(
        q, k_cache, v_cache, query_start, seq_lens, block_tables, out, scale, window, soft_cap,
        config, tails,
    )  # fmt: skip
    num_sequences = call.num_sequences
    if q.shape[0] == 0 or (num_sequences == 0 and not batch_invariant):
        return out
    if batch_invariant and tails is not None:
        raise KernelError("tails are given with batch_invariant; leave one of them out.")
    if batch_invariant:
        _invariant(call, max_query_len)
        return out
    few, block_m = _decode_rows(call, max_query_len)
    if max_query_len is not None and max_query_len > few and num_sequences == 1 and tails is None:
        few = 0  # nothing to decode
    if max_query_len is None or max_query_len > few:
        _prefill(call, few)
    if few:
        _decode(call, few, block_m)
    return out
