"""Tiles and argument checks of the products with quantised weights.

All three kernels compute y^T = W x^T, so that a tile of W is the left operand: codes are unpacked
in registers, and Hopper's matrix units take only the left operand from registers. The tile of x
grows with its rows; with few rows, `in` is split so that enough programs read W at the same time.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from minillm_kernels.gemv import LEAST_SPLIT
from minillm_kernels.launch import KernelError, check_contiguous, check_shape, triton

FEWEST_COLUMNS = 32  # of a tile: the smallest product of 8-bit numbers
MOST_COLUMNS = 128


@dataclass(frozen=True)
class Config:
    """Tile of a program: rows of W, rows of x, columns of both; `splits` programs share a row."""

    block_out: int
    block_rows: int
    block_in: int
    num_warps: int = 4
    num_stages: int = 4
    splits: int = 1


@dataclass(frozen=True)
class Grid:
    """Programs of a launch, and the columns of each split."""

    blocks: tuple[int, int, int]
    split: int

    @property
    def num_splits(self) -> int:
        """Splits that have columns."""
        return self.blocks[2]


def block_in_of(group: int) -> int:
    """Columns of a tile that lies within one group of scales."""
    block = MOST_COLUMNS
    while block > FEWEST_COLUMNS and group % block:
        block //= 2
    return block


@lru_cache(maxsize=1024)
def choose_config(
    num_rows: int,
    num_out: int,
    size: int,
    block_in: int,
    arch: int,
    multiprocessors: int,
    batch_invariant: bool = False,
    full: bool = False,
) -> Config:
    """Tiles by architecture and shape. In the batch-invariant mode they do not depend on the
    number of rows. `full`: x is float32, whose products do not use matrix units."""
    rows = 1 if batch_invariant else num_rows
    block_rows = next((each for each in (16, 32, 64) if rows <= each), 128)
    if arch == 0:  # the cost of an interpreted program does not depend on its size
        return Config(64, min(block_rows, 64), block_in)
    if full:  # a tile of 64 rows would use sm_100's units, which round float32 to tf32
        return Config(32, 16, FEWEST_COLUMNS)
    large = block_rows == 128
    block_out = 128 if large else 64
    programs = triton.cdiv(num_out, block_out) * triton.cdiv(rows, block_rows)
    splits = max(1, min(2 * multiprocessors // programs, size // LEAST_SPLIT))
    return Config(block_out, block_rows, block_in, 8 if large else 4, 3 if large else 4, splits)


def grid_of(config: Config, num_rows: int, num_out: int, size: int) -> Grid:
    """The programs of a launch. Each split has whole tiles; rounding up may give fewer splits."""
    tiles = triton.cdiv(max(size, 1), config.block_in)
    split = triton.cdiv(tiles, config.splits) * config.block_in
    blocks = triton.cdiv(num_out, config.block_out), triton.cdiv(num_rows, config.block_rows)
    return Grid((*blocks, max(1, triton.cdiv(size, split))), split)


def check_group(group: int, name: str = "a group") -> None:
    """Check that tiles of columns fit into a group."""
    if group < FEWEST_COLUMNS or group % FEWEST_COLUMNS:
        raise KernelError(
            f"{name} has {group} columns; it must have a multiple of {FEWEST_COLUMNS}. Make the "
            "matrix dense for other groups."
        )


def check_bias(bias: Tensor | None, num_out: int) -> None:
    """Check the shape and the layout of a bias."""
    if bias is not None:
        check_shape("bias", bias, num_out)
        check_contiguous(bias=bias)


def partial_sums(out: Tensor, splits: int, dtype: torch.dtype) -> Tensor:
    """The workspace [splits, M, out] of several splits; the output itself for one."""
    if splits == 1:
        return out
    return torch.empty(splits, *out.shape, dtype=dtype, device=out.device)
