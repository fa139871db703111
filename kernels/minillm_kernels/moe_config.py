"""What a call of `moe.moe_experts` must be, and how its products are cut.

The cut is a table by architecture, dtype and rows per expert.

What decides is how many rows meet one expert's weights, N k / E on average, because it says what
the bound is (see `moe`): few rows want narrow tiles and many programs, so that every multiprocessor
has tens of kilobytes of weights under way; many rows want the widest products that the registers
hold. Nothing is measured at run time: a call must cost the same the first time, and under a CUDA
graph there is no second one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm_kernels.launch import (
    INTEGERS,
    KernelError,
    TensorDescriptor,
    check_contiguous,
    check_dtype,
    check_last_contiguous,
    check_same_dtype,
    check_shape,
)


@dataclass(frozen=True)
class Tile:
    """What one program of a product computes: `n` columns, `k` of the inner dimension at a time."""

    n: int
    k: int
    num_warps: int = 4
    num_stages: int = 4


@dataclass(frozen=True)
class Config:
    """How a call is cut.

    Attributes:
        block_m: rows of one expert in a program.
        gate_up: its tile is there twice, for gate and for up.
        descriptors: weights and hidden come by bulk copies (TMA), where their rows allow it.
        direct: each pair for itself, without sorting (see `moe`).
        group_bytes: how much of the rows shall stay in the L2 cache while all columns pass.
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


# The interpreter pays for operations, not for numbers: tiles that hold a whole test.
INTERPRETED = Config(32, Tile(128, 256), Tile(128, 256))
FLOAT32 = Config(32, Tile(32, 32, 4, 2), Tile(64, 32, 4, 2))
# 16 rows are the least that tensor cores take. A program of `direct` waits for memory with seven
# tiles of 8 KB under way.
DIRECT = Config(16, Tile(16, 256), Tile(16, 256, 4, 8), direct=True)
DECODE = Config(16, Tile(32, 128), Tile(32, 128))
# 64 rows are the least of Hopper's asynchronous products (WGMMA).
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

    If `batch_invariant`, the number of tokens does not count, so that each token's sums are cut
    alike in every batch.
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
    """A tensor as rows for bulk copies of [rows, columns], if it can be; else the tensor itself.

    The copy engine wants rows that begin at multiples of 16 bytes.
    """
    aligned = tensor.shape[-1] * tensor.element_size() % 16 == 0 and tensor.data_ptr() % 16 == 0
    if not (config.descriptors and aligned):
        return tensor
    return TensorDescriptor.from_tensor(tensor.flatten(0, -2), [rows, columns])


def check_arguments(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> None:
    """Shapes, dtypes and strides of a call of `moe.moe_experts` (KernelError)."""
    check_same_dtype(x=x, gate_up=gate_up, down=down)
    check_dtype((torch.float32,), weights=weights)
    check_dtype(INTEGERS, ids=ids)
    check_shape("x", x, "N", "d")
    check_shape("gate_up", gate_up, "E", "2 I", x.shape[1])
    num_experts, double = gate_up.shape[:2]
    if double % 2:
        raise KernelError(
            f"gate_up is {list(gate_up.shape)}; its second size must be even, gate above up."
        )
    check_shape("down", down, num_experts, x.shape[1], double // 2)
    check_shape("ids", ids, len(x), "k")
    check_shape("weights", weights, *ids.shape)
    if not 1 <= ids.shape[1] <= num_experts:
        raise KernelError(
            f"ids is {list(ids.shape)}: {ids.shape[1]} experts per token; with {num_experts} "
            f"experts there must be 1 to {num_experts}."
        )
    if 0 in down.shape:
        raise KernelError(f"down is {list(down.shape)}; no size of an expert may be 0.")
    check_last_contiguous(x=x)
    check_contiguous(gate_up=gate_up, down=down, weights=weights, ids=ids)
