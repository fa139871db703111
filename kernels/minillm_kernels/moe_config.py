"""Argument checks and tiles of `moe.moe_experts`.

Tiles come from a table by architecture, dtype and rows per expert, N k / E on average, which
decides the bound (see `moe`). Few rows need narrow tiles and many programs, so that every
multiprocessor has tens of kilobytes of weights in flight; many rows need the largest tiles that fit
into registers. There is no autotuning: the first call would be slow, and CUDA graphs rule it out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm_kernels import require
from minillm_kernels.launch import KernelError, TensorDescriptor


@dataclass(frozen=True)
class Tile:
    """The tile of one program: `n` columns, and `k` numbers of the inner dimension at a time."""

    n: int
    k: int
    num_warps: int = 4
    num_stages: int = 4


@dataclass(frozen=True)
class Config:
    """Tiles of a call.

    Attributes:
        block_m: rows of one expert in a program.
        gate_up: tile of the first product, held twice, for gate and for up.
        descriptors: load weights and hidden by bulk copies (TMA), if their rows allow it.
        direct: a block per pair, without sorting (see `moe`).
        group_bytes: bytes of rows that stay in the L2 cache while all columns are computed.
    """

    block_m: int
    gate_up: Tile
    down: Tile
    descriptors: bool = False
    direct: bool = False
    group_bytes: int = 16 << 20

    def group(self, rows: Tensor) -> int:
        """Blocks of `rows` [.., K] that fit into `group_bytes`, at least one."""
        block = self.block_m * rows.shape[-1] * rows.element_size()
        return max(1, self.group_bytes // block)


# The interpreter's cost is per operation, not per number: a tile holds a whole test case.
INTERPRETED = Config(32, Tile(128, 256), Tile(128, 256))
FLOAT32 = Config(32, Tile(32, 32, 4, 2), Tile(64, 32, 4, 2))
# Tensor cores need at least 16 rows. A program of `direct` has seven tiles of 8 KB in flight.
DIRECT = Config(16, Tile(16, 256), Tile(16, 256, 4, 8), direct=True)
DECODE = Config(16, Tile(32, 128), Tile(32, 128))
# Hopper's asynchronous products (WGMMA) need at least 64 rows.
MIDDLE_80 = Config(64, Tile(64, 64, 4, 3), Tile(128, 64, 4, 3))
MIDDLE_90 = Config(64, Tile(64, 64), Tile(128, 64), descriptors=True)
PREFILL_80 = Config(128, Tile(64, 64, 8, 3), Tile(128, 64, 8, 3))
PREFILL_90 = Config(128, Tile(128, 64, 8), Tile(256, 64, 8), descriptors=True)


def choose_config(
    target: int,
    dtype: torch.dtype,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    batch_invariant: bool = False,
) -> Config:
    """The tiles for a call; `target` is `launch.arch()`.

    If `batch_invariant`, tiles do not depend on the number of tokens, so that each token's sums are
    split in the same way in every batch.
    """
    if target == 0:
        return INTERPRETED
    if dtype == torch.float32:
        return FLOAT32
    middle, prefill = (MIDDLE_90, PREFILL_90) if target >= 90 else (MIDDLE_80, PREFILL_80)
    num_pairs = num_tokens * top_k
    if batch_invariant:
        return middle
    if num_tokens == 1 or 4 * num_pairs <= num_experts:
        return DIRECT
    if num_pairs <= 8 * num_experts:
        return DECODE
    return middle if num_pairs <= 64 * num_experts else prefill


def operand(tensor: Tensor, rows: int, columns: int, config: Config) -> object:
    """A descriptor of [rows, columns] tiles for bulk copies if supported, else the tensor itself.

    Bulk copies need rows that are aligned to 16 bytes.
    """
    aligned = tensor.shape[-1] * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
    if not (config.descriptors and aligned):
        return tensor
    return TensorDescriptor.from_tensor(tensor.flatten(0, -2), [rows, columns])


def check_arguments(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> None:
    """Check shapes, dtypes and strides of `moe.moe_experts`; raises KernelError."""
    require.same_dtype(x=x, gate_up=gate_up, down=down)
    require.dtype((torch.float32,), weights=weights)
    require.dtype(require.INTEGERS, ids=ids)
    require.shape("x", x, "N", "d")
    require.shape("gate_up", gate_up, "E", "2 I", x.shape[1])
    num_experts, double = gate_up.shape[:2]
    if double % 2:
        raise KernelError(
            f"gate_up is {list(gate_up.shape)}; its second size must be even, gate above up."
        )
    require.shape("down", down, num_experts, x.shape[1], double // 2)
    require.shape("ids", ids, len(x), "k")
    require.shape("weights", weights, *ids.shape)
    if not 1 <= ids.shape[1] <= num_experts:
        raise KernelError(
            f"ids is {list(ids.shape)}: {ids.shape[1]} experts per token; with {num_experts} "
            f"experts there must be 1 to {num_experts}."
        )
    if 0 in down.shape:
        raise KernelError(f"down is {list(down.shape)}; no size of an expert may be 0.")
    require.last_contiguous(x=x)
    require.contiguous(gate_up=gate_up, down=down, weights=weights, ids=ids)
