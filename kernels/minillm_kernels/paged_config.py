"""How paged attention cuts its work: tiles by architecture, splits by the number of processors."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

RESIDENT = 3  # programs that a multiprocessor holds at once, limited by shared memory
FEW = 16  # query rows of a sequence, at most, that are decoded together
MANY_WAVES = 4  # so many leave no processor idle for long, split or not
MAX_SPLITS = 64


@dataclass(frozen=True)
class Tiles:
    """How one kernel cuts its work.

    Attributes:
        block_n: positions of a KV tile.
        block_m: rows of a query tile (positions times heads of a group); of decode's, the most
            (it takes fewer where fewer will do, and more for a larger group).
        swap: decode multiplies K by the queries and not the queries by K.
        bulk: read pages by descriptor, where a tile lies within one page of a contiguous cache.
        least_heads: heads of a group are padded to this power of two at least if `swap`: 16
            columns run on the new matrix instruction of Hopper, 8 on the old one, in less memory.
            Without `swap` they are rows, and at least 16.
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
        splits: parts of a decode row, each a program; None chooses by the size of the GPU. In the
            batch-invariant mode 1 means one program for all parts, and more one for each.
        min_split_tiles: a part has at least so many tiles.
        split_size: positions of a part in the batch-invariant mode; a multiple of its `block_n`.
            Together with `invariant`, it decides that mode's bits.
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

    Tiles are the largest whose accumulators fit into the registers on every architecture and with
    both oldest and newest supported Triton; in the batch-invariant mode there are two accumulators.
    """
    if capability == 0:  # an operation costs the same whatever its size: few and large ones
        tiles = Tiles(block_n=64, num_warps=4, num_stages=1, block_m=64)
        return Config(tiles, tiles, tiles, min_split_tiles=1, split_size=256)
    if dtype == torch.float32:  # no matrix unit multiplies these exactly; for tests of equality
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
    """Into how many parts each decode row is cut, from shapes alone.

    Few programs leave multiprocessors idle, and so does a last wave that is nearly empty: the
    smallest number whose waves are at least 85% as full as the best ones (FlashAttention's rule,
    2023). A row that is shorter than the shapes allow uses fewer parts by itself.
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
