"""Tiles, splits and argument checks of `minillm_kernels.mla`.

Tiles come from a table by architecture, dtype and shape; there is no autotuning.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import require
from minillm_kernels.launch import KernelError, TensorDescriptor, padded

MAX_VALUE_DIM = 512
MAX_ROPE_DIM = 128
INVARIANT_SPLIT = 512  # positions; changing it changes the bits of every result
LEAST_TILES = 4  # of a split; with fewer, writing partial results costs more than reading keys
MAX_SEQUENCES = 65_535  # the third dimension of a launch
MAX_WORKSPACE = 256 * 2**20  # bytes of partial results


@dataclass(frozen=True)
class Tile:
    """The tile of one program.

    Attributes:
        block_h: heads.
        block_q: query tokens. block_h * block_q is at least 16, the smallest product.
        block_n: keys.
        swap: transposed products, keys first.
        descriptors: bulk copies of whole tiles; a page must be a multiple of `block_n`.
        num_warps: warps of a program.
        num_stages: tiles in flight.
    """

    block_h: int
    block_q: int
    block_n: int
    swap: bool
    num_warps: int = 8
    num_stages: int = 2
    descriptors: bool = False


@dataclass(frozen=True)
class Config:
    """Tiles of both kernels, and the positions of a split.

    `split` 0 divides a sequence evenly, so that the GPU is full. Otherwise splits start at
    multiples of `split` in both kernels, which then need the same `block_n`. If partial results
    would take more than `max_workspace` bytes, the prefill kernel computes all sequences.
    """

    decode: Tile
    prefill: Tile
    split: int = 0
    max_workspace: int = MAX_WORKSPACE

    def fit(self, cache: Tensor, value_dim: int) -> "Config":
        """This configuration, without descriptors if the cache does not support them."""
        sizes = (value_dim, cache.shape[-1] - value_dim)
        if all(padded(size) == size for size in sizes) and cache.data_ptr() % 16 == 0:
            return self
        plain = [replace(tile, descriptors=False) for tile in (self.decode, self.prefill)]
        return replace(self, decode=plain[0], prefill=plain[1])


def choose(
    arch: int, dtype: torch.dtype, num_heads: int, page: int, invariant: bool = False, few: int = 1
) -> Config:
    """The tiles for an architecture (0: interpreted), dtype, number of heads and block size.

    `few` is the largest number of query tokens of a decode sequence; the bits of the
    batch-invariant mode do not depend on it.
    """
    heads = padded(num_heads, 1)
    if invariant:
        tile = _invariant_tile(arch, dtype, heads)
        return Config(tile, tile, INVARIANT_SPLIT)
    return Config(_decode_tile(arch, dtype, heads, page, few), _prefill_tile(arch, dtype, heads))


def _tile(heads: int, queries: int, block_n: int, swap: bool, **options: Any) -> Tile:
    """A tile of `queries` queries: all heads if they fit, and several tokens to fill the rest."""
    block_h = min(heads, queries)
    return Tile(block_h, queries // block_h, block_n, swap, **options)


# Stages: the address of a cache tile comes from the block table, so it is loaded one stage before
# the tile. Hopper's products are asynchronous: 3 stages are two tiles in shared memory there, and 5
# elsewhere. With descriptors (2 stages), the kernel looks up addresses explicitly.


def _decode_tile(arch: int, dtype: torch.dtype, heads: int, page: int, few: int) -> Tile:
    """The decode tile; latents are read once if one tile holds all query tokens of a sequence."""
    queries = padded(heads * few)
    if arch == 0:
        return _tile(heads, min(queries, 64), 128, swap=True)
    if dtype == torch.float32:
        return _tile(heads, 16, 16, swap=False, num_warps=4, num_stages=1)
    if arch != 90:
        if few > 1 and queries > 16:
            return _prefill_tile(arch, dtype, heads)
        return _tile(heads, 16, 32, swap=False, num_stages=3 if arch < 90 else 5)
    if queries <= 32:  # memory-bound: 74 KB in flight while 74 KB are processed
        bulk = page % 64 == 0
        return _tile(heads, queries, 64, True, num_stages=2 if bulk else 3, descriptors=bulk)
    # 64 queries fill Hopper's instruction; their float32 sums fill half of the registers.
    if page % 64:
        return _tile(heads, 64, 32, swap=False, num_stages=3)
    return _tile(heads, 64, 64, swap=False, descriptors=True)


def _prefill_tile(arch: int, dtype: torch.dtype, heads: int) -> Tile:
    if arch == 0:
        return _tile(heads, 64, 128, swap=False)
    if dtype == torch.float32:
        return _tile(heads, 16, 16, swap=False, num_warps=4, num_stages=1)
    queries = 32 if arch < 90 else 64
    return _tile(heads, queries, 32, swap=False, num_stages=5 if arch < 90 else 3)


def _invariant_tile(arch: int, dtype: torch.dtype, heads: int) -> Tile:
    """16 queries, because the prefill kernel keeps two sums in registers: of a split and total."""
    if arch == 0:
        return _tile(heads, 16, 64, swap=True)
    if dtype == torch.float32:
        return _tile(heads, 16, 16, swap=False, num_warps=4, num_stages=1)
    if arch == 90:
        return _tile(heads, 16, 64, swap=True, num_stages=3)
    return _tile(heads, 16, 32, swap=False, num_stages=3 if arch < 90 else 5)


def count_splits(
    config: Config, rows: int, heads: int, positions: int, processors: int, few: int = 1
) -> int:
    """Number of splits of a decode launch, from shapes alone.

    `positions` is the capacity of a block table, `few` the query tokens of a sequence. Even splits
    fill the multiprocessors once, or twice if one wave would leave many of them idle.
    """
    if config.split:
        return max(1, -(-positions // config.split))
    programs = rows * -(-few // config.decode.block_q) * -(-heads // config.decode.block_h)
    most = max(1, positions // (config.decode.block_n * LEAST_TILES))
    once, twice = processors // programs, 2 * processors // programs
    splits = twice if twice > 2.3 * once else once
    return max(1, min(splits, most))


def check_config(config: Config, page: int, value_dim: int, rope_dim: int) -> None:
    """Check that the kernels support a configuration; raises KernelError."""
    for name, tile in (("decode", config.decode), ("prefill", config.prefill)):
        sizes = (tile.block_h, tile.block_q, tile.block_n)
        if any(size < 1 or size & (size - 1) for size in sizes) or tile.block_n < 16:
            raise KernelError(
                f"the {name} tile is {tile}; blocks must be powers of two, of 16 keys at least."
            )
        if tile.block_h * tile.block_q < 16:
            raise KernelError(f"the {name} tile is {tile}; it must have 16 queries at least.")
        whole = padded(value_dim) == value_dim and padded(rope_dim) == rope_dim
        if tile.descriptors and (page % tile.block_n or not whole):
            raise KernelError(
                f"the {name} tile has descriptors: a page of {page} must be a multiple of "
                f"{tile.block_n}, and {value_dim} and {rope_dim} powers of two from 16 on."
            )
        if config.split % tile.block_n or (config.split and tile.block_n != config.decode.block_n):
            raise KernelError(
                f"a split of {config.split} positions needs tiles of one size that divides it; "
                f"decode has {config.decode.block_n} keys and {name} {tile.block_n}."
            )


def check_arguments(
    q: Tensor,
    latent_cache: Tensor,
    value_dim: int,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    out: Tensor | None,
) -> Tensor:
    """Check all tensors, and return the output."""
    require.shape("q", q, "N", "H", "R + Dr")
    num_tokens, num_heads, width = q.shape
    require.shape("latent_cache", latent_cache, "blocks", 1, "block_size", width)
    require.same_dtype(q=q, latent_cache=latent_cache)
    require.device(q=q, latent_cache=latent_cache)
    require.last_contiguous(q=q)
    require.contiguous(latent_cache=latent_cache)
    require.sequences(q, latent_cache, query_start, seq_lens, block_tables)
    if not 0 < value_dim <= MAX_VALUE_DIM or value_dim >= width:
        raise KernelError(
            f"value_dim is {value_dim} of a key of {width}; it must be from 1 to {MAX_VALUE_DIM}, "
            "and leave a rotated part."
        )
    if width - value_dim > MAX_ROPE_DIM:
        raise KernelError(
            f"the rotated part of a key is {width - value_dim}; it must be at most {MAX_ROPE_DIM}."
        )
    if len(seq_lens) > MAX_SEQUENCES:
        raise KernelError(f"there are {len(seq_lens)} sequences; at most {MAX_SEQUENCES} will do.")
    return require.output(out, (num_tokens, num_heads, value_dim), q)


def tensor_descriptors(cache: Tensor, value_dim: int, tile: Tile) -> tuple[Any, Any]:
    """Descriptors for the two parts of a tile; (None, None) without bulk copies."""
    if not tile.descriptors:
        return None, None
    rows = cache.view(-1, cache.shape[-1])  # [blocks * block_size, R + Dr]
    rope_dim = cache.shape[-1] - value_dim
    return (
        TensorDescriptor.from_tensor(rows, [tile.block_n, value_dim]),
        TensorDescriptor.from_tensor(rows, [tile.block_n, rope_dim]),
    )
