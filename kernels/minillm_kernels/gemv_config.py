"""Tiles of the products of few rows, by architecture and shape."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from minillm_kernels.launch import padded, triton

LEAST_SPLIT = 512  # columns; a shorter split ends before its pipeline is full
LEAST_ROWS, MOST_ROWS = 16, 64  # of x in a tile: the fewest of matrix units; what registers hold


@dataclass(frozen=True)
class Config:
    """Tile of W of a program, and its pipeline.

    Attributes:
        num_stages: tiles in flight and in use; 1 loads directly to registers.
        splits: programs that share the columns of a row; 1 for one row of x.
        block_rows: rows of x of a program.
    """

    block_out: int
    block_in: int
    num_warps: int = 4
    num_stages: int = 1
    splits: int = 1
    block_rows: int = LEAST_ROWS


@lru_cache(maxsize=1024)
def config_for(
    rows: int, num_out: int, size: int, dtype: torch.dtype, arch: int, multiprocessors: int
) -> Config:
    """Tiles by architecture and shape; `rows` of x are 1 or a power of two from `LEAST_ROWS` on, so
    that one binary serves all numbers between."""
    half, block_rows = dtype.itemsize == 2, min(rows, MOST_ROWS)
    if rows == 1 and arch:
        # At least three programs for each multiprocessor, of eight rows if there are enough.
        wanted = 3 * multiprocessors
        rows = next((rows for rows in (8, 4, 2) if triton.cdiv(num_out, rows) >= wanted), 1)
        return Config(rows, min(1024 if half else 512, padded(size)), num_stages=3)
    if arch == 0:  # the cost of an interpreted program does not depend on its size
        tile = Config(64, 1024 if rows == 1 else 512, block_rows=block_rows)
    elif not half:
        tile = Config(32, 32, num_stages=4)  # matrix units do not support full float32
    elif block_rows == LEAST_ROWS:  # up to 92 kB: two programs fit into a multiprocessor
        tile = Config(64, 128, num_stages=4)
    else:
        tile = Config(64, 64, num_stages=5 if block_rows == 32 else 4, block_rows=block_rows)
        # x is read once for each tile of W: wide ones, if that leaves enough programs
        programs = triton.cdiv(num_out, 128) * max(1, size // LEAST_SPLIT)
        if block_rows == MOST_ROWS and programs >= multiprocessors:
            tile = replace(tile, block_out=128, num_stages=3)
    if rows == 1:
        return tile
    programs = triton.cdiv(num_out, tile.block_out) * triton.cdiv(rows, tile.block_rows)
    splits = max(1, min(2 * multiprocessors // programs, size // LEAST_SPLIT))
    return replace(tile, splits=splits)
