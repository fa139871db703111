"""Products of int8 weights with int8 activations (W8A8), for any number of rows.

The weight [out, in] has a scale for each row, and so have activations, computed at run time:

    quantize_rows   s[m] = max |x[m]| / 127,  q[m] = round(x[m] / s[m])
    int8_linear     y[m, o] = sum_i q[m, i] w[o, i] * s[m] * scale[o] + b[o]

    bytes   in out + M in + 2 M out         operations   2 M in out in int8, twice bf16's rate

The sum is in int32 and exact, so its order does not matter: a row has the same bits for every
number of rows, tile and split, without a special mode. (It cannot overflow below 133,000 columns.)
Scaling uses one fused multiply-add, the same in both kernels that finish a sum.

`quantize_rows` computes IEEE divisions and rounds half to even, as torch does, so its codes do not
depend on the device. E4m3 codes are rounded in integer arithmetic, because GPUs before compute
capability 8.9 have no such type. A row with NaN or infinity has the scale NaN: the error stays
visible in its results, and in no other row.

Dettmers et al., LLM.int8(), 2022, section 2.1 (vector-wise quantisation).
"""

from types import MappingProxyType

import torch
from torch import Tensor

from minillm_kernels.launch import (
    FLOATS,
    INTERPRETED,
    KernelError,
    arch,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_same_dtype,
    check_shape,
    num_multiprocessors,
    output,
    padded,
    tl,
    triton,
)
from minillm_kernels.quantized_config import (
    MOST_COLUMNS,
    Config,
    check_bias,
    choose_config,
    grid_of,
    partial_sums,
)

__all__ = ["Config", "int8_linear", "quantize_rows"]

E4M3 = torch.float8_e4m3fn
MOST = MappingProxyType({torch.int8: 127.0, E4M3: 448.0})  # largest number of a code
# Above this many columns a sum of products of 127 x 127 could leave int32.
LONGEST = (2**31 - 1) // 127**2


# ---- activations ------------------------------------------------------------------------------


@triton.jit
def _to_int8(number):
    """Round to the nearest integer, half to even: 1.5 * 2^23 leaves no bits for a fraction."""
    return ((number + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def _to_e4m3(number):
    """The bits of the nearest e4m3 number, half to even; |number| is at most 448."""
    bits = number.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Of 23 bits of fraction 3 remain; exponents are biased by 7 instead of 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 steps are 2^-9: the last bit of 2^14 in float32.
    small = (tl.abs(number) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _quantize_row(
    x_ptr, codes_ptr, scales_ptr, size, x_stride, most,
    INTEGERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its largest number, then its codes."""
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_stride
    largest = tl.zeros((BLOCK,), tl.float32)
    wrong = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + column, mask=column < size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
        wrong += x * 0.0  # NaN if x is NaN or infinite; a maximum ignores NaN
    scale = tl.div_rn(tl.max(largest), most) + tl.sum(wrong)
    tl.store(scales_ptr + row, scale)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + column, mask=column < size, other=0.0).to(tl.float32)
        number = tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + scale)
        # 0 / 0 in a row of zeros is 0; a code of a row whose scale is NaN does not matter.
        number = tl.where(number == number, tl.minimum(tl.maximum(number, -most), most), 0.0)
        code = _to_int8(number) if INTEGERS else _to_e4m3(number)
        tl.store(codes_ptr + row * size + column, code, mask=column < size)


def quantize_rows(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """`quantized_reference.quantize_rows`: x [M, in] -> codes [M, in] (int8 or e4m3), float32
    scales [M]. Rows of x may have any stride."""
    check_device(x=x)
    check_same_dtype(x=x)
    check_shape("x", x, "M", "in")
    check_last_contiguous(x=x)
    if dtype not in MOST:
        raise KernelError(f"the dtype of codes is {dtype}; it must be int8 or float8_e4m3fn.")
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        _quantize_row[(len(x),)](
            *(x, codes.view(torch.uint8) if dtype == E4M3 else codes, scales),
            *(x.shape[1], x.stride(0), MOST[dtype]),
            INTEGERS=dtype == torch.int8,
            BLOCK=min(4096 if INTERPRETED else 1024, padded(max(1, x.shape[1]))),
            num_warps=4,
        )
    return codes, scales


# ---- products ---------------------------------------------------------------------------------


@triton.jit
def _scaled(total, x_scale, scale, bias):
    """The result of an exact sum; one rounding for the last product and the bias."""
    return tl.fma(total.to(tl.float32) * x_scale, scale, bias)


@triton.jit(do_not_specialize=["num_rows"])
def _int8_tile(
    x_ptr, x_scales_ptr, codes_ptr, scales_ptr, bias_ptr, out_ptr, num_rows, num_out,
    x_stride, codes_stride, out_stride, split_stride,
    SIZE: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """A tile of y^T [BLOCK_OUT, BLOCK_ROWS] from `SPLIT` columns of both factors.

    If `WHOLE` (one split), `out` is y; otherwise an int32 workspace with a matrix per split.
    """
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    here, live = out < num_out, row < num_rows
    x_rows = x_ptr + row.to(tl.int64)[:, None] * x_stride
    code_rows = codes_ptr + out.to(tl.int64)[:, None] * codes_stride
    begin = tl.program_id(2) * SPLIT
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.int32)
    for start in range(begin, tl.minimum(begin + SPLIT, SIZE), BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        inside = (column < SIZE)[None, :]
        place = code_rows + column[None, :]
        mask = here[:, None] & inside
        codes = tl.load(place, mask=mask, other=0, eviction_policy="evict_first")
        x = tl.load(x_rows + column[None, :], mask=live[:, None] & inside, other=0)
        total = tl.dot(codes, tl.trans(x), total, out_dtype=tl.int32)
    mask = here[:, None] & live[None, :]
    place = out_ptr + tl.program_id(2).to(tl.int64) * split_stride
    place += row.to(tl.int64)[None, :] * out_stride + out[:, None]
    if WHOLE:
        x_scale = tl.load(x_scales_ptr + row, mask=live, other=0.0)
        scale = tl.load(scales_ptr + out, mask=here, other=0.0).to(tl.float32)
        bias = tl.zeros((BLOCK_OUT,), tl.float32)
        if bias_ptr is not None:
            bias += tl.load(bias_ptr + out, mask=here, other=0.0).to(tl.float32)
        result = _scaled(total, x_scale[None, :], scale[:, None], bias[:, None])
        tl.store(place, result.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(place, total, mask=mask)


@triton.jit
def _finish_splits(
    parts_ptr, x_scales_ptr, scales_ptr, bias_ptr, out_ptr, num_numbers, num_out, out_stride,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add partial sums [splits, M, out] and scale them."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = number < num_numbers
    row, column = (number // num_out).to(tl.int64), number % num_out
    total = tl.zeros((BLOCK,), tl.int32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + split * num_numbers + number, mask=mask, other=0)
    x_scale = tl.load(x_scales_ptr + row, mask=mask, other=0.0)
    scale = tl.load(scales_ptr + column, mask=mask, other=0.0).to(tl.float32)
    bias = tl.zeros((BLOCK,), tl.float32)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
    result = _scaled(total, x_scale, scale, bias)
    place = out_ptr + row * out_stride + column
    tl.store(place, result.to(out_ptr.dtype.element_ty), mask=mask)


def int8_linear(
    x_codes: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """`quantized_reference.int8_linear`: int8 [M, in], [out, in] -> [M, out] in `dtype`.

    `x_scales` float32 [M] and `scales` [out] of the rows. Bits of a row do not depend on others.
    """
    tensors = {"x_codes": x_codes, "x_scales": x_scales, "codes": codes, "scales": scales}
    device = check_device(**tensors, bias=bias)
    _check(x_codes, x_scales, codes, scales, bias, dtype)
    (num_rows, size), num_out = x_codes.shape, len(codes)
    out = output(out, (num_rows, num_out), x_scales.new_empty(0, dtype=dtype))
    if not out.numel():
        return out
    config = config or choose_config(
        *(num_rows, num_out, size, MOST_COLUMNS, arch(), num_multiprocessors(device))
    )
    grid = grid_of(config, num_rows, num_out, size)
    target = partial_sums(out, grid.num_splits, torch.int32)
    _int8_tile[grid.blocks](
        *(x_codes, x_scales, codes, scales, bias, target, num_rows, num_out),
        *(x_codes.stride(0), codes.stride(0), target.stride(-2), target.stride(0)),
        SIZE=size,
        SPLIT=grid.split,
        WHOLE=grid.num_splits == 1,
        BLOCK_OUT=config.block_out,
        BLOCK_ROWS=config.block_rows,
        BLOCK_IN=config.block_in,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if grid.num_splits > 1:
        block = 8192 if INTERPRETED else 512
        _finish_splits[(triton.cdiv(num_rows * num_out, block),)](
            *(target, x_scales, scales, bias, out, num_rows * num_out, num_out, out.stride(0)),
            SPLITS=grid.num_splits,
            BLOCK=block,
            num_warps=4,
        )
    return out


def _check(
    x_codes: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> None:
    check_dtype((torch.int8,), x_codes=x_codes, codes=codes)
    check_dtype((torch.float32,), x_scales=x_scales)
    check_dtype(FLOATS, scales=scales, bias=bias)
    if dtype not in FLOATS:
        raise KernelError(f"the result is {dtype}; it must be float32, float16 or bfloat16.")
    check_shape("x_codes", x_codes, "M", "in")
    num_rows, size = x_codes.shape
    if size > LONGEST:
        raise KernelError(
            f"x_codes has {size} columns; above {LONGEST} a sum could exceed int32: split the "
            "columns."
        )
    check_shape("codes", codes, "out", size)
    check_shape("x_scales", x_scales, num_rows)
    check_shape("scales", scales, len(codes))
    check_last_contiguous(x_codes=x_codes, codes=codes)
    check_contiguous(x_scales=x_scales, scales=scales)
    check_bias(bias, len(codes))
