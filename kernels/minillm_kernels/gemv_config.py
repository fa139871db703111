"""Tiles of the products of few rows, by architecture and shape."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from minillm_kernels.launch import padded, triton

LEAST_SPLIT = 512  # columns; a shorter split ends before its pipeline is full


@dataclass(frozen=True)
class Config:
    """Tile of W of a program, and its pipeline.

    Attributes:
        num_stages: tiles in flight and in use; 1 loads directly to registers.
        splits: programs that share the columns of a row; 1 for one row of x.
    """

    block_out: int
    block_in: int
    num_warps: int = 4
    num_stages: int = 1
    splits: int = 1


@lru_cache(maxsize=1024)
def config_for(
    several: bool, num_out: int, size: int, dtype: torch.dtype, arch: int, multiprocessors: int
) -> Config:
    """Tiles by architecture and shape; of M, only whether it is 1 matters."""
    half = dtype.itemsize == 2
    if arch == 0:  # the cost of an interpreted program does not depend on its size
        tile = Config(64, 512) if several else Config(64, 1024)
    elif not several:
        # At least three programs for each multiprocessor, of eight rows if there are enough.
        wanted = 3 * multiprocessors
        rows = next((rows for rows in (8, 4, 2) if triton.cdiv(num_out, rows) >= wanted), 1)
        return Config(rows, min(1024 if half else 512, padded(size)), num_stages=3)
    elif half:
        tile = Config(64, 128, num_stages=4)  # 80 kB: two programs fit into a multiprocessor
    else:
        tile = Config(32, 32, num_stages=4)  # matrix units do not support full float32
    if not several:
        return tile
    slots = 2 * multiprocessors // triton.cdiv(num_out, tile.block_out)
    splits = max(1, min(slots, size // LEAST_SPLIT))
    return Config(tile.block_out, tile.block_in, tile.num_warps, tile.num_stages, splits)
