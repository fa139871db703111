"""The mended interpreter against torch: every bit of bfloat16, and no access outside of a tensor.

Without `interpreter.install` almost every test of this file fails, or ends the process.
"""

import os
import subprocess
import sys

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from minillm_kernels import interpreter
from minillm_kernels.interpreter import OutOfBoundsError, extent, ordered_dots
from minillm_kernels.launch import KernelError, tl, triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
SIZE = 512


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    different = (bits(got) != bits(expected)) & ~(got.isnan() & expected.isnan())
    assert not different.any(), f"{got[different][:4]} instead of {expected[different][:4]}"


def numbers(dtype: torch.dtype, seed: int = 0, count: int = SIZE) -> torch.Tensor:
    """Numbers of every size, zeros of both signs and infinities."""
    rng = torch.Generator().manual_seed(seed)
    scale = torch.exp(6 * torch.randn(count, generator=rng))
    values = torch.randn(count, generator=rng) * scale
    values[:4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    return values.to(dtype)


# ---- arithmetic -------------------------------------------------------------------------------


@triton.jit
def binary(x, y, out, OP: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(x + at), tl.load(y + at)
    if OP == "add":
        result = a + b
    elif OP == "subtract":
        result = a - b
    elif OP == "multiply":
        result = a * b
    elif OP == "maximum":
        result = tl.maximum(a, b)
    elif OP == "minimum":
        result = tl.minimum(a, b)
    elif OP == "where":
        result = tl.where(a < b, a, b)
    elif OP == "negative":
        result = -a
    elif OP == "absolute":
        result = tl.abs(a)
    elif OP == "scalar":
        result = a * 2.5 + 1.0
    tl.store(out + at, result)


BINARY = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": torch.fmax,
    "minimum": torch.fmin,
    "where": lambda a, b: torch.where(a < b, a, b),
    "negative": lambda a, b: -a,
    "absolute": lambda a, b: a.abs(),
    "scalar": lambda a, b: a * 2.5 + 1.0,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", BINARY)
def test_arithmetic_is_torchs(op, dtype):
    a, b = numbers(dtype, 1), numbers(dtype, 2)
    out = torch.empty_like(a)
    binary[(1,)](a, b, out, op, SIZE)
    expected = BINARY[op](a, b)
    if op == "scalar" and dtype == torch.float16:
        expected = (a * torch.tensor(2.5, dtype=dtype)) + torch.tensor(1.0, dtype=dtype)
    same = expected + 0.0 if op == "negative" else expected  # 0 - 0 is +0: no instruction negates
    assert_same_bits(out + 0.0 if op == "negative" else out, same)


@triton.jit
def compare(x, y, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(x + at), tl.load(y + at)
    found = (a < b).to(tl.int32) + 2 * (a <= b).to(tl.int32) + 4 * (a > b).to(tl.int32)
    found += 8 * (a >= b).to(tl.int32) + 16 * (a == b).to(tl.int32) + 32 * (a != b).to(tl.int32)
    tl.store(out + at, found)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_comparisons_are_torchs(dtype):
    a, b = numbers(dtype, 1), numbers(dtype, 2)
    b[::3] = a[::3]
    out = torch.empty(SIZE, dtype=torch.int32)
    compare[(1,)](a, b, out, SIZE)
    expected = (a < b) + 2 * (a <= b) + 4 * (a > b) + 8 * (a >= b) + 16 * (a == b) + 32 * (a != b)
    assert torch.equal(out, expected.to(torch.int32))


@triton.jit
def multiply_add(x, y, z, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.fma(tl.load(x + at), tl.load(y + at), tl.load(z + at)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_multiply_add_rounds_once(dtype):
    rng = torch.Generator().manual_seed(3)
    x, y = (torch.randn(SIZE, generator=rng).to(dtype) for _ in range(2))
    z = -(x * y)  # what the product's rounding lost is all that is left
    out = torch.empty_like(x)
    multiply_add[(1,)](x, y, z, out, SIZE)
    assert_same_bits(out, (x.double() * y.double() + z.double()).to(dtype))
    assert (out != 0).any()


@triton.jit
def cast(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_casts_round_to_nearest_even(source, target):
    x = numbers(source)
    out = torch.empty(SIZE, dtype=target)
    cast[(1,)](x, out, SIZE)
    assert_same_bits(out, x.to(target))


def test_every_bfloat16_survives_a_cast_and_every_tie_goes_to_even():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    out = torch.empty(2**16, dtype=torch.float32)
    cast[(1,)](every.view(torch.bfloat16), out, 2**16)
    assert_same_bits(out, every.view(torch.bfloat16).float())
    ties = (every.view(torch.int16).to(torch.int32) << 16) + 2**15
    narrow = torch.empty(2**16, dtype=torch.bfloat16)
    cast[(1,)](ties.view(torch.float32), narrow, 2**16)
    assert_same_bits(narrow, ties.view(torch.float32).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_saturates_as_hardware_does(dtype):
    x = torch.tensor([0.1, 500.0, -1e6, 448.0, 0.0019, 17.3, -0.4, float("inf")] * 64)
    out = torch.empty(SIZE, dtype=dtype)
    cast[(1,)](x, out, SIZE)
    largest = torch.finfo(dtype).max
    assert torch.equal(out.float(), x.clamp(-largest, largest).to(dtype).float())


# ---- products and reductions ------------------------------------------------------------------


@triton.jit
def product(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    left, right = tl.load(a + m * K + k[None, :]), tl.load(b + k[:, None] * N + n)
    tl.store(out + m * N + n, tl.dot(left, right, input_precision="ieee"))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_product_has_float32_sums_of_exact_products(dtype):
    rng = torch.Generator().manual_seed(4)
    a, b = torch.randn(32, 64, generator=rng), torch.randn(64, 16, generator=rng)
    a, b = a.to(dtype), b.to(dtype)
    out = torch.empty(32, 16)
    product[(1,)](a, b, out, 32, 16, 64)
    expected = a.double() @ b.double()
    assert (out - expected).abs().max() < 1e-5
    ordered = torch.zeros(32, 16)
    for k in range(64):
        ordered += a[:, k, None].float() * b[k].float()
    with ordered_dots():
        product[(1,)](a, b, out, 32, 16, 64)
    assert_same_bits(out, ordered)


def test_ordered_products_do_not_depend_on_the_other_rows():
    rng = torch.Generator().manual_seed(5)
    a, b = torch.randn(64, 128, generator=rng), torch.randn(128, 16, generator=rng)
    whole, part = torch.empty(64, 16), torch.empty(16, 16)
    with ordered_dots():
        product[(1,)](a, b, whole, 64, 16, 128)
        product[(1,)](a[48:], b, part, 16, 16, 128)
    assert_same_bits(whole[48:], part)


@triton.jit
def reduce(x, out, OP: tl.constexpr, SIZE: tl.constexpr):
    rows, at = tl.arange(0, 4), tl.arange(0, SIZE)
    values = tl.load(x + rows[:, None] * SIZE + at[None, :])
    if OP == "sum":
        tl.store(out + rows, tl.sum(values, axis=1))
    elif OP == "max":
        tl.store(out + rows, tl.max(values, axis=1))
    elif OP == "argmax":
        tl.store(out + rows, tl.argmax(values, axis=1))
    elif OP == "cumsum":
        places = rows[:, None] * SIZE + at[None, :]
        tl.store(out + places, tl.cumsum(values, axis=1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_reductions_are_torchs(dtype):
    rng = torch.Generator().manual_seed(6)
    x = torch.randint(-8, 9, (4, 64), generator=rng).to(dtype)  # sums of these are exact
    total, largest = torch.empty(4, dtype=dtype), torch.empty(4, dtype=dtype)
    place, running = torch.empty(4, dtype=torch.int32), torch.empty(4, 64, dtype=dtype)
    reduce[(1,)](x, total, "sum", 64)
    reduce[(1,)](x, largest, "max", 64)
    reduce[(1,)](x, place, "argmax", 64)
    reduce[(1,)](x, running, "cumsum", 64)
    assert_same_bits(total, x.float().sum(1).to(dtype))
    assert_same_bits(largest, x.amax(1))
    assert torch.equal(place.long(), (x == x.amax(1, keepdim=True)).int().argmax(1))
    assert_same_bits(running, x.float().cumsum(1).to(dtype))


def test_sums_of_bfloat16_are_rounded_once():
    """4096 ones and a 256: summed in bfloat16 the ones would be lost."""
    x = torch.ones(4, 4096, dtype=torch.bfloat16)
    out = torch.empty(4, dtype=torch.bfloat16)
    reduce[(1,)](x, out, "sum", 4096)
    assert out.tolist() == [4096.0] * 4


# ---- memory -----------------------------------------------------------------------------------


@triton.jit
def touch(x, out, offset, last, OP: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    mask = at < last
    if OP == "read":
        tl.store(out + at, tl.load(x + at + offset, mask=mask, other=0.0), mask=mask)
    elif OP == "write":
        tl.store(x + at + offset, tl.load(out + at, mask=mask), mask=mask)
    elif OP == "add":
        tl.atomic_add(x + at + offset, 1.0, mask=mask)
    elif OP == "max":
        tl.atomic_max(x + at + offset, 1.0, mask=mask)
    elif OP == "swap":
        tl.atomic_cas(x + at + offset, tl.load(out + at), tl.load(out + at))
    elif OP == "one":
        tl.store(out, tl.load(x + offset))


class Buffer:
    """A view of 16 numbers in the middle of 48, and another tensor far away."""

    def __init__(self, dtype=torch.float32):
        self.whole = torch.arange(48, dtype=dtype)
        self.view = self.whole[16:32]
        self.other = torch.zeros(16, dtype=dtype)


VERBS = {"read": "reads", "write": "writes", "add": "changes", "max": "changes"}


@pytest.mark.parametrize("op", VERBS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_ends_of_a_view_are_guarded(op, dtype):
    if dtype == torch.bfloat16 and op in ("add", "max"):
        pytest.skip("the interpreter has no such atomic operation")
    size = dtype.itemsize
    buffer = Buffer(dtype)
    touch[(1,)](buffer.view, buffer.other, 0, 16, op, 16)  # all of it, and no more
    before = buffer.whole.clone()
    behind = f"touch at program (0, 0, 0) {VERBS[op]} 0 bytes behind the end of x."
    with pytest.raises(Exception, match="OutOfBoundsError") as caught:
        touch[(1,)](buffer.view, buffer.other, 1, 16, op, 16)
    assert isinstance(caught.value.__cause__, OutOfBoundsError)  # Triton wraps it
    assert str(caught.value.__cause__) == behind
    with pytest.raises(Exception, match=rf"{VERBS[op]} {2 * size} bytes before the beginning of x"):
        touch[(1,)](buffer.view, buffer.other, -2, 16, op, 16)
    assert torch.equal(buffer.whole, before), "an access that was refused changed something"


def test_an_exchange_is_guarded():
    buffer = Buffer(torch.int32)
    touch[(1,)](buffer.view, buffer.other, 0, 16, "swap", 16)
    with pytest.raises(Exception, match="changes 0 bytes behind the end of x"):
        touch[(1,)](buffer.view, buffer.other, 1, 16, "swap", 16)


def test_a_single_number_is_guarded():
    buffer = Buffer()
    touch[(1,)](buffer.view, buffer.other, 15, 16, "one", 16)
    assert buffer.other[0] == 31
    with pytest.raises(Exception, match="reads 0 bytes behind the end of x"):
        touch[(1,)](buffer.view, buffer.other, 16, 16, "one", 16)


def test_masked_lanes_touch_nothing():
    buffer = Buffer()
    touch[(1,)](buffer.view, buffer.other, 10, 6, "read", 16)
    assert buffer.other[:6].tolist() == [26.0, 27.0, 28.0, 29.0, 30.0, 31.0]
    touch[(1,)](buffer.view, buffer.other, 1000, 0, "write", 16)


def test_far_away_is_named_too():
    buffer = Buffer()
    with pytest.raises(Exception, match="reads 32 bytes behind the end of x"):
        touch[(1,)](buffer.view, buffer.other, 24, 1, "read", 16)
    with pytest.raises(Exception, match=r"reads \d{9,} bytes behind the end of "):
        touch[(1,)](buffer.view, buffer.other, 2**40, 1, "read", 16)


@triton.jit
def tile(source, out, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, source.load([row, 0]))


@triton.jit
def made_inside(x, out, rows, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS])
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, source.load([0, 0]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_descriptor_pads_and_is_guarded(dtype):
    whole = torch.randn(12, 16).to(dtype)
    out = torch.empty(8, 16, dtype=dtype)
    tile[(1,)](TensorDescriptor.from_tensor(whole, [8, 16]), out, 4, 8, 16)
    assert torch.equal(out, whole[4:])
    tile[(1,)](TensorDescriptor.from_tensor(whole, [8, 16]), out, 8, 8, 16)
    assert torch.equal(out, torch.cat((whole[8:], torch.zeros(4, 16, dtype=dtype))))
    made_inside[(1,)](whole, out, 12, 8, 16)
    assert torch.equal(out, whole[:8])
    with pytest.raises(Exception, match="reads 0 bytes behind the end of x"):
        made_inside[(1,)](whole[:6], out, 8, 8, 16)  # it claims two rows too many


def test_extents_are_those_of_views():
    whole = torch.empty(10, 8)
    start = whole.data_ptr()
    assert extent(whole) == (start, start + 320)
    assert extent(whole[2:4, 3:5]) == (start + 4 * 19, start + 4 * 29)
    assert extent(whole.t()) == extent(whole)
    assert extent(whole[5:5]) == (whole[5:5].data_ptr(),) * 2


# ---- installing -------------------------------------------------------------------------------


@triton.jit
def one_more(value):
    return value + tl.max(value, axis=0)


@triton.jit
def count_up(x, STEPS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    value = tl.load(x + at)
    for _ in tl.static_range(STEPS):
        value = one_more(value)
    tl.store(x + at, value)


def test_a_call_of_a_function_prepares_nothing_again(monkeypatch):
    from triton.runtime import interpreter as module

    prepared = []
    original = module._patch_builtin
    monkeypatch.setattr(
        module, "_patch_builtin", lambda part, *rest: (prepared.append(part), original(part, *rest))
    )
    counts = []
    for steps in (1, 8):
        x = torch.ones(16)
        count_up[(2,)](x, STEPS=steps, SIZE=16)
        assert (x == 4**steps).all()
        counts.append(len(prepared))
        prepared.clear()
    assert counts[0] == counts[1] > 0


def test_the_language_is_itself_after_a_launch():
    def language():
        return tl.load, tl.store, tl.range, hasattr(tl.tensor, "__bool__")

    before = language()
    count_up[(1,)](torch.ones(16), STEPS=2, SIZE=16)
    assert language() == before
    with pytest.raises(Exception, match="OutOfBoundsError"):
        count_up[(1,)](torch.ones(15), STEPS=2, SIZE=16)
    assert language() == before


def test_another_interpreter_is_noticed(monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "product", staticmethod(lambda a, b, dtype: a @ b + 1))
    with pytest.raises(KernelError, match="This version of Triton has another interpreter"):
        interpreter._self_test()


def test_without_the_variable_there_is_nothing_to_mend():
    code = "from minillm_kernels import interpreter\ninterpreter.install()"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1
    assert "KernelError: TRITON_INTERPRET=1 is not set, or was set after" in done.stderr
