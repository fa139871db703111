"""Tiles of paged attention by architecture, and splits by the number of multiprocessors."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

RESIDENT = 3  # programs per multiprocessor, limited by shared memory
FEW = 16  # maximum number of query rows of a decode sequence
MANY_WAVES = 4  # with this many waves of programs, splits are not needed to fill the GPU
MAX_SPLITS = 64


@dataclass(frozen=True)
class Tiles:
    """Tiles of one kernel.

    Attributes:
        block_n: positions of a KV tile.
        block_m: rows of a query tile (positions x heads of a group); for decode the maximum (fewer
            if they suffice, more for a larger group).
        swap: decode computes K Q^T instead of Q K^T.
        bulk: load pages by descriptor, if a tile lies within one page of a contiguous cache.
        least_heads: with `swap`, heads of a group are padded to at least this power of two: 16
            columns use Hopper's new matrix instruction, 8 the old one, with less memory. Without
            `swap`, heads are rows, and at least 16.
    """

    block_n: int
    num_warps: int
    num_stages: int
    block_m: int = 0
    swap: bool = False
    bulk: bool = False
    least_heads: int = 8


@dataclass(frozen=True)
class Config:
    """The tiles of the three kernels, and the splits of a decode row.

    Attributes:
        splits: splits of a decode row, one program each; None chooses by the size of the GPU. In
            the batch-invariant mode, 1 means one program for all splits, more a program for each.
        min_split_tiles: minimum number of tiles of a split.
        split_size: positions of a split in the batch-invariant mode; a multiple of its `block_n`.
            Together with `invariant`, it determines that mode's bits.
    """

    decode: Tiles
    prefill: Tiles
    invariant: Tiles
    splits: int | None = None
    min_split_tiles: int = 4
    split_size: int = 1024


@lru_cache
def choose(capability: int, dtype: torch.dtype, head_dim: int) -> Config:
    """The configuration for a compute capability (0: interpreted), dtype and padded head_dim.

    Tiles are the largest whose accumulators fit into registers on every architecture, with the
    oldest and the newest supported Triton. The batch-invariant mode has two accumulators.
    """
    if capability == 0:  # interpreted: the cost is per operation, so tiles are large
        tiles = Tiles(block_n=64, num_warps=4, num_stages=1, block_m=64)
        return Config(tiles, tiles, tiles, min_split_tiles=1, split_size=256)
    if dtype == torch.float32:  # matrix units do not multiply float32 exactly; for tests only
        tiles = Tiles(block_n=32, num_warps=8, num_stages=1, block_m=16)
        return Config(tiles, tiles, replace(tiles, num_warps=4))
    large = head_dim > 128
    if capability < 90:
        return Config(
            decode=Tiles(
                block_n=64, num_warps=4, num_stages=2 if large else 3, block_m=32 if large else 64
            ),
            prefill=Tiles(
                block_n=32 if large else 64, num_warps=8, num_stages=2,
                block_m=128 if head_dim <= 64 else 64,
            ),
            invariant=Tiles(block_n=32, num_warps=8, num_stages=2, block_m=32 if large else 64),
        )  # fmt: skip
    bulk = capability < 100  # on Blackwell two accumulators and descriptors spill
    if large:
        decode = Tiles(block_n=32, num_warps=4, num_stages=3, block_m=32, swap=True, bulk=True)
        prefill = Tiles(block_n=32, num_warps=8, num_stages=2, block_m=64, bulk=True)
        invariant = Tiles(block_n=32, num_warps=8, num_stages=2, block_m=32, bulk=bulk)
        return Config(decode, prefill, invariant)
    return Config(
        decode=Tiles(
            block_n=64, num_warps=4, num_stages=3, block_m=64, swap=True, bulk=True, least_heads=16
        ),
        prefill=Tiles(block_n=64, num_warps=8, num_stages=3, block_m=128, bulk=True),
        invariant=Tiles(block_n=64, num_warps=8, num_stages=2, block_m=64, bulk=bulk),
    )


@lru_cache
def count_splits(programs: int, most_tiles: int, multiprocessors: int, min_tiles: int) -> int:
    """Number of splits of a decode row, from shapes alone.

    Few programs, or a nearly empty last wave, leave multiprocessors idle. The result is the
    smallest number of splits whose waves are at least 85% as full as the best (the heuristic of
    FlashAttention, 2023). Shorter rows use fewer splits.
    """
    places = multiprocessors * RESIDENT
    most = min(MAX_SPLITS, most_tiles // min_tiles)
    if most <= 1 or programs >= MANY_WAVES * places:
        return 1

    def fullness(splits: int) -> float:
        waves = programs * splits / places
        return waves / math.ceil(waves)

    best = max(map(fullness, range(1, most + 1)))
    return next(n for n in range(1, most + 1) if fullness(n) >= 0.85 * best)
