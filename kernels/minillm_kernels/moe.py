"""Mixture-of-experts layers: every token through its k chosen SwiGLU experts, and their sum.

    out[n] = sum over j of weights[n, j] * down[e] @ (silu(gate[e] @ x[n]) * (up[e] @ x[n])),
             e = ids[n, j]

Shapes: N tokens of d numbers; E experts with `gate_up` [E, 2 I, d] (gate above up) and `down`
[E, d, I]. A loop over experts would need E small products, and the host would wait for the ids. A
*grouped* product is one launch for all experts (Gale et al., MegaBlocks, 2022):

1. `moe_plan.make_plan` sorts the N k pairs (token, choice) by expert, in blocks of `block_m` rows.
2. `_gate_up_kernel`: one program computes gate and up of a block, loads each tile of x once for
   both, and multiplies them in registers -> hidden, in sorted order.
3. `_down_kernel`: multiplies by `down` and by the routing weight -> contributions [N, k, d].
4. `_sum_kernel` adds the k contributions of a token in the order of its choices. There are no
   atomics, and a token's bits depend only on its own input.

Programs are ordered in groups of blocks: all blocks of a group use a column of weight tiles before
the next column starts. Blocks of one expert run at the same time, so that they share the weight
tile in the L2 cache, and a group is small enough that its rows stay there for all columns.

*Direct.* When few tokens share an expert (N = 1 above all), sorting gains nothing: each pair is a
block, and `_down_of_token_kernel` loops over the k experts of a token and keeps the sum in
registers. This takes two launches instead of four.

Bytes: the weights of A active experts once, 3 A d I numbers, and x, out, hidden and contributions
(written and read, N k (I + d)). Operations: 6 N k d I, in half precision N k / A per byte: below
about 180 rows per expert, an H200 is memory-bound, above it compute-bound. Qwen3-30B-A3B (128
experts, top-8, 2048 x 768): 75 MB for one token; 1.2 GB and 309 GFLOP for 4096 tokens, where both
bounds are close.

Products accumulate in float32; hidden and each contribution are rounded once to the dtype of x.
"""

from typing import NamedTuple

from torch import Tensor

from minillm_kernels import require
from minillm_kernels.launch import arch, cdiv, padded, tl, triton
from minillm_kernels.moe_config import Config, Tile, check_arguments, choose_config, operand
from minillm_kernels.moe_plan import check_ids, existing_expert, make_plan

LOG2_E = tl.constexpr(1.4426950408889634)


class _Call(NamedTuple):
    """The arguments of a call, checked."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    weights: Tensor
    ids: Tensor
    out: Tensor
    config: Config


def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Run each token through its chosen SwiGLU experts and sum, weighted; `reference.moe_experts`.

    `x` [N, d] (rows may have gaps), `gate_up` [E, 2 I, d], `down` [E, d, I], `weights` float32
    [N, k] and `ids` int32 or int64 [N, k], an expert at most once in a row -> [N, d]. With
    `batch_invariant` a token's bits depend on its row of x, weights and ids only. Grids depend on
    shapes only (CUDA graphs). Raises KernelError for unsupported arguments and, when debugging, for
    ids outside of the experts.
    """
    require.device(x=x, gate_up=gate_up, down=down, weights=weights, ids=ids)
    check_arguments(x, gate_up, down, weights, ids)
    out = require.output(out, x.shape, x)
    if config is None:
        shape = x.shape[0], ids.shape[1], len(gate_up)
        config = choose_config(arch(), x.dtype, *shape, batch_invariant)
    if x.shape[0] == 0:
        return out
    check_ids(ids, len(gate_up))
    run = _run_direct if config.direct else _run_sorted
    run(_Call(x, gate_up, down, weights, ids, out, config))
    return out


def _run_sorted(call: _Call) -> None:
    """Steps 1 to 4, for any number of tokens."""
    config, out, (num_experts, d, intermediate) = call.config, call.out, call.down.shape
    num_tokens, top_k = call.ids.shape
    plan = make_plan(call.ids, num_experts, config.block_m)
    num_blocks = len(plan[0])
    hidden = call.x.new_empty(num_blocks * config.block_m, intermediate)
    _launch_gate_up(call, hidden, *plan)

    tile = config.down
    weight = operand(call.down, tile.n, tile.k, config)
    described = weight is not call.down
    # With one choice per token the contribution is the result.
    contributions = out if top_k == 1 else call.x.new_empty(num_tokens * top_k, d)
    _down_kernel[(num_blocks * cdiv(d, tile.n),)](
        operand(hidden, config.block_m, tile.k, config) if described else hidden, weight,
        call.weights, contributions, *plan, num_blocks, config.group(hidden),
        contributions.stride(0), d, intermediate, **_options(config, tile, described),
    )  # fmt: skip
    if top_k > 1:
        block = min(1024, padded(d))
        grid = num_tokens, cdiv(d, block)
        _sum_kernel[grid](contributions, out, out.stride(0), d, TOP_K=top_k, BLOCK=block)


def _run_direct(call: _Call) -> None:
    """A block per pair, for few tokens."""
    config, tile, (num_experts, d, intermediate) = call.config, call.config.down, call.down.shape
    num_tokens, top_k = call.ids.shape
    hidden = call.x.new_empty(num_tokens * top_k, intermediate)
    _launch_gate_up(call, hidden, None, None)
    weight = operand(call.down, tile.n, tile.k, config)
    _down_of_token_kernel[(cdiv(d, tile.n), num_tokens)](
        hidden, weight, call.weights, call.ids, call.out, num_experts, top_k, call.out.stride(0),
        d, intermediate, CHOICES=padded(top_k, 2),
        **_options(config, tile, weight is not call.down),
    )  # fmt: skip


def _launch_gate_up(
    call: _Call, hidden: Tensor, expert_of_block: Tensor | None, pair_of_row: Tensor | None
) -> None:
    """Launch the first product, of sorted rows or (without a plan) of single pairs."""
    config, tile, intermediate = call.config, call.config.gate_up, hidden.shape[1]
    num_blocks = call.ids.numel() if expert_of_block is None else len(expert_of_block)
    weight = operand(call.gate_up, tile.n, tile.k, config)
    _gate_up_kernel[(num_blocks * cdiv(intermediate, tile.n),)](
        call.x, weight, hidden, call.ids, expert_of_block, pair_of_row, num_blocks,
        config.group(call.x), len(call.gate_up), call.ids.shape[1], call.x.stride(0),
        call.x.shape[1], intermediate, **_options(config, tile, weight is not call.gate_up),
    )  # fmt: skip


def _options(config: Config, tile: Tile, descriptors: bool) -> dict[str, int]:
    """The compile-time constants of every product."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "DESCRIPTORS": descriptors,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


# ---- kernels -----------------------------------------------------------------------------------


@triton.jit
def _place(num_blocks, num_columns, group):
    """The block and the column of tiles of this program: down a group's blocks, then right.

    0 2 4      blocks 0 and 1, group = 2
    1 3 5
    6 7 8      block 2: the last group may be smaller
    """
    program = tl.program_id(0)
    first = program // (group * num_columns) * group
    size = tl.minimum(num_blocks - first, group)
    inside = program - first * num_columns
    return first + inside % size, inside // size


@triton.jit
def _weight_tile(
    weight, first_row, num_rows, k, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_K] of a weight with rows of K numbers, 0 after the end of K.

    Rows of the tile from `num_rows` on belong to another matrix (or do not exist), so the caller
    must not store those columns of the product. A quantised weight would be widened here.
    """
    if DESCRIPTORS:
        tile = weight.load([first_row, k])  # 0 after the end of the tensor
    else:
        rows = tl.arange(0, BLOCK_N)
        columns = k + tl.arange(0, BLOCK_K)
        pointers = weight + (first_row + rows)[:, None].to(tl.int64) * K + columns[None, :]
        inside = (rows < num_rows)[:, None] & (columns < K)[None, :]
        # A weight is read once, or by programs that run at the same time: evict it first.
        tile = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _rows_tile(x, offsets, valid, k, K, BLOCK_K: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of rows that start at `offsets`; 0 for rows that are not valid."""
    columns = k + tl.arange(0, BLOCK_K)
    mask = valid[:, None] & (columns < K)[None, :]
    return tl.load(x + offsets[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["num_blocks", "group", "num_experts", "top_k"])
def _gate_up_kernel(
    x, weight, hidden, ids, expert_of_block, pair_of_row, num_blocks, group, num_experts, top_k,
    x_stride, d, intermediate, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """hidden = silu(x gate^T) * (x up^T) for one block of rows and BLOCK_N columns; `weight` has
    the rows of [E, 2 I, d]."""
    block, column = _place(num_blocks, tl.cdiv(intermediate, BLOCK_N), group)
    column *= BLOCK_N
    row = tl.arange(0, BLOCK_M)
    if expert_of_block is None:  # block b is pair b
        expert = existing_expert(tl.load(ids + block), num_experts)
        pair = tl.where(row == 0, block, -1)
        hidden_row, stored = block + row, pair >= 0
    else:
        expert = tl.load(expert_of_block + block)
        if expert < 0:
            return
        pair = tl.load(pair_of_row + block * BLOCK_M + row)
        hidden_row, stored = block * BLOCK_M + row, row >= 0  # padding is stored as 0
    valid = pair >= 0
    token = tl.where(valid, pair // top_k, 0).to(tl.int64)

    gate_row = expert * 2 * intermediate + column
    up_row = gate_row + intermediate
    left = intermediate - column
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, d, BLOCK_K):
        rows = _rows_tile(x, token * x_stride, valid, k, d, BLOCK_K)
        tile = _weight_tile(weight, gate_row, left, k, d, BLOCK_N, BLOCK_K, DESCRIPTORS)
        gate = tl.dot(rows, tile.T, gate, input_precision="ieee")
        tile = _weight_tile(weight, up_row, left, k, d, BLOCK_N, BLOCK_K, DESCRIPTORS)
        up = tl.dot(rows, tile.T, up, input_precision="ieee")

    silu = gate / (1 + tl.exp2(-gate * LOG2_E))
    columns = column + tl.arange(0, BLOCK_N)
    pointers = hidden + hidden_row[:, None].to(tl.int64) * intermediate + columns[None, :]
    mask = stored[:, None] & (columns < intermediate)[None, :]
    tl.store(pointers, (silu * up).to(hidden.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_blocks", "group"])
def _down_kernel(
    hidden, weight, weights, contributions, expert_of_block, pair_of_row, num_blocks, group,
    contribution_stride, d, intermediate, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """contribution = (hidden down^T) * routing weight, back in the order of the pairs; `weight` has
    the rows of [E, d, I]."""
    block, column = _place(num_blocks, tl.cdiv(d, BLOCK_N), group)
    column *= BLOCK_N
    expert = tl.load(expert_of_block + block)
    if expert < 0:
        return
    row = tl.arange(0, BLOCK_M)
    pair = tl.load(pair_of_row + block * BLOCK_M + row)
    valid = pair >= 0
    offsets = (block * BLOCK_M + row).to(tl.int64) * intermediate

    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, intermediate, BLOCK_K):
        if DESCRIPTORS:
            rows = hidden.load([block * BLOCK_M, k])
        else:
            rows = _rows_tile(hidden, offsets, valid, k, intermediate, BLOCK_K)
        tile = _weight_tile(
            weight, expert * d + column, d - column, k, intermediate, BLOCK_N, BLOCK_K, DESCRIPTORS
        )
        product = tl.dot(rows, tile.T, product, input_precision="ieee")

    routing = tl.load(weights + pair, mask=valid, other=0.0)
    columns = column + tl.arange(0, BLOCK_N)
    pointers = contributions + pair[:, None].to(tl.int64) * contribution_stride + columns[None, :]
    mask = valid[:, None] & (columns < d)[None, :]
    result = product * routing[:, None]
    tl.store(pointers, result.to(contributions.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(contributions, out, out_stride, d, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out[n] = contributions[n, 0] + contributions[n, 1] + .., always in this order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):  # unrolled, so that all k loads are in flight at once
        row = contributions + (token * TOP_K + choice) * d
        total += tl.load(row + columns, mask=columns < d, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + columns, total.to(out.dtype.element_ty), mask=columns < d)


@triton.jit(do_not_specialize=["num_experts", "top_k"])
def _down_of_token_kernel(
    hidden, weight, weights, ids, out, num_experts, top_k, out_stride, d, intermediate,
    CHOICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """out = sum over choices of (hidden down^T) * routing weight, for one token's BLOCK_N columns.

    One loop over all tiles of all choices, so that the prefetch continues from one expert to the
    next. All k ids are loaded before the loop and selected by a sum, because an id loaded in the
    loop would delay its weights. Tensor cores need BLOCK_M rows; only the first one is used.
    """
    column = tl.program_id(0) * BLOCK_N
    token = tl.program_id(1)
    choices = tl.arange(0, CHOICES)
    pairs = token * top_k + choices
    experts = existing_expert(tl.load(ids + pairs, mask=choices < top_k, other=0), num_experts)
    routing = tl.load(weights + pairs, mask=choices < top_k, other=0.0)
    first_row = tl.arange(0, BLOCK_M) == 0
    num_tiles = tl.cdiv(intermediate, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(top_k * num_tiles):
        choice, k = step // num_tiles, step % num_tiles * BLOCK_K
        expert = tl.sum(tl.where(choices == choice, experts, 0))
        offsets = tl.where(first_row, token * top_k + choice, 0).to(tl.int64) * intermediate
        rows = _rows_tile(hidden, offsets, first_row, k, intermediate, BLOCK_K)
        tile = _weight_tile(
            weight, expert * d + column, d - column, k, intermediate, BLOCK_N, BLOCK_K, DESCRIPTORS
        )
        product = tl.dot(rows, tile.T, input_precision="ieee")
        total += product * tl.sum(tl.where(choices == choice, routing, 0.0))

    columns = column + tl.arange(0, BLOCK_N)
    pointers = out + token.to(tl.int64) * out_stride + columns
    result = tl.sum(tl.where(first_row[:, None], total, 0.0), axis=0)
    tl.store(pointers, result.to(out.dtype.element_ty), mask=columns < d)
