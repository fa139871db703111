"""The C functions on rows against float64, for odd sizes, with bands around every tensor."""

import threading

import pytest
import torch
from torch import Tensor

from minillm.ops import c_library, cpu
from minillm_kernels import reference
from tests.ops.c_variants import ELEMENTS, Guarded, built, poisoned, torch_threads, ulps
from tests.pairs import cases

NAN, INF = float("nan"), float("inf")
MARKS = (55.0, 66.0)  # of keys and values that nobody wrote
ROWS = (0, 1, 15, 16, 17, 31, 32, 33)
SIZES = (1, 2, 15, 16, 17, 31, 33, 100, 576)
TOLERANCE = {  # bf16: one rounding, half of the last of 8 binary places
    torch.bfloat16: {"atol": 1e-30, "rtol": 2**-8},
    torch.float32: {"atol": 1e-30, "rtol": 1e-6},
}


@pytest.fixture(scope="module", params=ELEMENTS)
def c(request, path):
    """The functions of one path for one element type, which they also carry as `dtype`."""
    return built(path, request.param), ELEMENTS[request.param]


def draw(dtype: torch.dtype, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return poisoned((torch.randn(*shape, generator=generator) * scale).to(dtype))


# ---- norms -------------------------------------------------------------------------------------


def norm(c, x: Tensor, weight: Tensor, eps: float = 1e-5, stride: int | None = None) -> Tensor:
    found, dtype = c
    out = Guarded((len(x), x.shape[1]), dtype)
    stride = x.shape[1] if stride is None else stride
    n, d = x.shape
    found.rms_norm(x.data_ptr(), stride, weight.data_ptr(), out.inside.data_ptr(), n, d, eps)
    return out.checked()


def add_norm(c, x: Tensor, residual: Tensor, weight: Tensor, in_place: bool = False):
    found, dtype = c
    out, total = Guarded(tuple(x.shape), dtype), Guarded(tuple(x.shape), dtype)
    if in_place:
        total.inside.copy_(residual)
        residual = total.inside
    arguments = (x, residual, weight, out.inside, total.inside)
    found.add_rms_norm(*(each.data_ptr() for each in arguments), *x.shape, 1e-5)
    return out.checked(), total.checked()


@cases("d", SIZES)
def test_norm(c, d):
    for n in ROWS:
        x, weight = draw(c[1], n, d), draw(c[1], d, seed=1)
        expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
        torch.testing.assert_close(norm(c, x, weight).double(), expected, **TOLERANCE[c[1]])


def test_norm_of_rows_that_lie_apart(c):
    wide, weight = draw(c[1], 5, 50), draw(c[1], 37, seed=1)
    expected = reference.rms_norm(wide[:, :37].double(), weight.double(), 1e-5)
    got = norm(c, wide[:, :37], weight, stride=50).double()
    torch.testing.assert_close(got, expected, **TOLERANCE[c[1]])


def test_eps_counts(c):
    x, weight = draw(c[1], 2, 20, scale=1e-3), draw(c[1], 20, seed=1)
    for eps in (1e-3, 1e-6):
        expected = reference.rms_norm(x.double(), weight.double(), eps)
        got = norm(c, x, weight, eps).double()
        torch.testing.assert_close(got, expected, **TOLERANCE[c[1]])


@cases("in_place", [False, True])
@cases("d", SIZES)
def test_sum_and_norm(c, d, in_place):
    for n in ROWS:
        x, residual, weight = (
            draw(c[1], *s, seed=i) for i, s in enumerate(((n, d),) * 2 + ((d,),))
        )
        out, total = add_norm(c, x, residual, weight, in_place)
        assert torch.equal(total, x + residual)
        expected = reference.rms_norm(total.double(), weight.double(), 1e-5)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[c[1]])


@cases("place", [0, 15, 16, 32, 36])
def test_nan_fills_its_row_and_no_other(c, place):
    for bad in (NAN, INF, -INF):
        x, weight = draw(c[1], 3, 37), draw(c[1], 37, seed=1)
        x[1, place] = bad
        for got in (norm(c, x, weight), add_norm(c, x, torch.zeros_like(x), weight)[0]):
            assert got[1, place].isnan()
            assert not got[[0, 2]].isnan().any()
            expected = reference.rms_norm(x.float(), weight.float(), 1e-5)
            torch.testing.assert_close(got.float(), expected, equal_nan=True, atol=0.02, rtol=0.02)


def test_sums_are_rounded_to_the_nearest_even(c):
    """Every bf16 sum that lies half way between two numbers, and its neighbours."""
    one = torch.tensor([1.0, 1 + 2**-7, 1 + 2**-6, -1.0, -1 - 2**-7]).repeat_interleave(5)
    small = torch.tensor([2**-8, 2**-8 + 2**-14, 2**-8 - 2**-14, 2**-9, 0.0]).repeat(5)
    x, residual = (poisoned(each.to(c[1])[None]) for each in (one, small.copysign(one)))
    _, total = add_norm(c, x, residual, torch.ones(25, dtype=c[1]))
    assert torch.equal(total, x + residual)


# ---- the gate ----------------------------------------------------------------------------------


def gate(c, gate_up: Tensor) -> Tensor:
    found, dtype = c
    n, size = len(gate_up), gate_up.shape[1] // 2
    out = Guarded((n, size), dtype)
    found.silu_mul(gate_up.data_ptr(), out.inside.data_ptr(), n, size)
    return out.checked()


@cases("size", SIZES)
def test_gate(c, size):
    for n in (*ROWS, 1000 if size < 100 else 70):
        x = draw(c[1], n, 2 * size, scale=3)
        expected = reference.silu_mul(x.double())
        limit = 2**-7 if c[1] == torch.bfloat16 else 1e-6  # two roundings
        torch.testing.assert_close(gate(c, x).double(), expected, atol=1e-30, rtol=limit)


def test_the_gate_is_exact_to_a_few_units_of_the_last_place(c):
    g = torch.linspace(-87.3, 100, 40001).to(c[1])
    exact = torch.nn.functional.silu(g.double())
    got = gate(c, torch.cat((g, torch.ones_like(g)))[None])[0]
    if c[1] == torch.float32:
        assert ulps(got, exact).max() < 4
    else:
        torch.testing.assert_close(got.double(), exact, atol=1e-37, rtol=2**-8)


def test_the_gate_of_extreme_numbers(c):
    g = torch.tensor([-88.0, -89, -1e3, -1e30, -3e38, 3e38, INF, 0.0, -0.0, 1e-40]).to(c[1])
    got = gate(c, torch.cat((g, torch.ones_like(g)))[None])[0].double()
    assert got[:5].abs().max() < 1e-30
    assert torch.equal(got[5:9], g.double()[5:9].clone())
    assert 0 <= got[9] <= 1e-40
    bad = torch.tensor([NAN, -INF]).to(c[1])  # silu(-inf) is -inf / inf
    assert gate(c, torch.cat((bad, torch.ones_like(bad)))[None]).isnan().all()
    bad = torch.tensor([1.0, NAN]).to(c[1])[None]
    assert gate(c, bad).isnan().all()


# ---- norm, rotation, cache -----------------------------------------------------------------------


def angles(n: int, half: int) -> tuple[Tensor, Tensor]:
    at = torch.arange(n)[:, None] * 10000.0 ** -(torch.arange(half) / max(half, 1)) + 0.3
    return poisoned(at.cos()), poisoned(at.sin())


class Case:
    """The arguments of `norm_rope_write`, called with bands around everything."""

    def __init__(self, c, n=7, heads=4, kv_heads=2, d=24, block_size=4, normed=True, seed=0):
        self.functions, self.dtype = c
        self.shape = (n, heads, kv_heads, d, block_size)
        num_blocks = -(-n // block_size) + 2
        self.qkv = draw(self.dtype, n, heads + 2 * kv_heads, d, seed=seed)
        weights = draw(self.dtype, 2, d, seed=seed + 1)
        self.norms = (poisoned(weights[0]), poisoned(weights[1])) if normed else (None, None)
        self.cos, self.sin = angles(n, d // 2)
        shape = (num_blocks, kv_heads, block_size, d)
        self.caches = [Guarded(shape, self.dtype, fill) for fill in MARKS]
        order = torch.Generator().manual_seed(seed)
        self.num_slots = num_blocks * block_size
        self.slots = torch.randperm(self.num_slots, generator=order)[:n]

    def __call__(self, interleaved=False) -> tuple[int, Tensor]:
        n, heads, kv_heads, d, block_size = self.shape
        q = Guarded((n, heads, d), self.dtype)
        key, value = (cache.inside for cache in self.caches)
        weights = (None if each is None else each.data_ptr() for each in self.norms)
        wrong = self.functions.norm_rope_write(
            self.qkv.data_ptr(), *weights, 1e-5, self.cos.data_ptr(), self.sin.data_ptr(),
            interleaved, key.data_ptr(), value.data_ptr(), *key.stride()[:2], block_size,
            self.slots.data_ptr(), len(self.slots), q.inside.data_ptr(), n, heads, kv_heads, d,
            self.num_slots,
        )  # fmt: skip
        return wrong, q.checked()

    def filled(self):
        return zip(self.caches, MARKS, strict=True)

    def expected(self, interleaved=False) -> list[Tensor]:
        """q, keys and values in float64; what is not written keeps its mark."""
        caches = [torch.full(each.inside.shape, fill).double() for each, fill in self.filled()]
        norms = (None if each is None else each.double() for each in self.norms)
        cos, sin, qkv = self.cos.double(), self.sin.double(), self.qkv.double()
        slots = torch.where(self.slots < self.num_slots, self.slots, -1)
        q = reference.norm_rope_write(qkv, *norms, 1e-5, cos, sin, interleaved, *caches, slots)
        return [q, *caches]

    def check(self, interleaved=False) -> None:
        wrong, q = self(interleaved)
        assert wrong == int((self.slots[: self.shape[0]] >= self.num_slots).sum())
        expected = self.expected(interleaved)
        limit = 0.02 if self.dtype == torch.bfloat16 else 3e-6
        for got, want in zip((q, *(c.checked() for c in self.caches)), expected, strict=True):
            torch.testing.assert_close(got.double(), want, atol=limit, rtol=limit / 2)
        assert torch.equal(self.caches[1].checked().double(), expected[2])  # values are copied


@cases("interleaved", [False, True])
@cases("normed", [False, True])
@cases("d", [2, 14, 24, 64, 130, 512])
def test_query_and_cache(c, d, normed, interleaved):
    for n in (0, 1, 16, 33):
        Case(c, n, d=d, normed=normed).check(interleaved)


def test_rows_without_a_slot_are_not_cached(c):
    """Negative slots, and rows behind the last slot, have a query and nothing else."""
    case = Case(c, 9)
    case.slots[2] = -1
    case.slots[5] = -(2**62)
    case.slots = case.slots[:7]
    case.check()


def test_a_slot_that_does_not_exist_is_counted_and_not_written(c):
    case = Case(c, 9)
    case.slots[0], case.slots[8] = case.num_slots, 2**62
    case.check()


def test_nan_stays_in_its_head(c):
    case = Case(c, 3, heads=2, kv_heads=1)
    case.qkv[1, 0, 3] = NAN
    case.qkv[2, 2, 0] = NAN
    _, q = case()
    assert q[1, 0].isnan().all()
    assert not q[[0, 2]].isnan().any()
    assert not q[1, 1].isnan().any()
    keys = case.caches[0].checked().transpose(1, 2).flatten(0, 1)
    assert keys[case.slots[2]].isnan().all()
    assert not keys[case.slots[:2]].isnan().any()


# ---- through the wrappers ------------------------------------------------------------------------


def test_wrappers_take_what_the_reference_takes(dtype):
    x, weight = draw(dtype, 3, 5, 40)[:, 1:3, ::2], draw(dtype, 40, seed=1)[::2]
    limit = {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(
        cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **limit
    )
    got, expected = (m.add_rms_norm(x, x, weight, 1e-5) for m in (cpu, reference))
    torch.testing.assert_close(got, expected, **limit)
    torch.testing.assert_close(cpu.silu_mul(x), reference.silu_mul(x), **limit)
    assert cpu.rms_norm(x[:0], weight, 1e-5).shape == (0, 2, 20)


def arguments(dtype: torch.dtype) -> dict:
    cos, sin = angles(3, 8)
    return {
        "qkv": draw(dtype, 3, 4, 16),
        "q_weight": draw(dtype, 16),
        "k_weight": draw(dtype, 16),
        "eps": 1e-5,
        "cos": cos,
        "sin": sin,
        "interleaved": False,
        "k_cache": torch.zeros(2, 1, 4, 16, dtype=dtype),
        "v_cache": torch.zeros(2, 1, 4, 16, dtype=dtype),
        "slot_mapping": torch.arange(3),
    }


WRONG = {
    "a weight of another length": lambda a: {"q_weight": a["q_weight"][:8]},
    "a weight of another type": lambda a: {"k_weight": a["k_weight"].half()},
    "angles of another length": lambda a: {"cos": a["cos"][:2]},
    "angles of another type": lambda a: {"sin": a["sin"].double()},
    "a cache of another type": lambda a: {"k_cache": a["k_cache"].half()},
    "a cache of shorter rows": lambda a: {
        "k_cache": a["k_cache"][..., :8],
        "v_cache": a["v_cache"][..., :8],
    },
    "two caches of two shapes": lambda a: {"v_cache": a["v_cache"][:1]},
    "a cache of rows apart": lambda a: {
        name: torch.zeros(2, 1, 8, 16, dtype=a["qkv"].dtype)[:, :, ::2]
        for name in ("k_cache", "v_cache")
    },
    "slots of another type": lambda a: {"slot_mapping": a["slot_mapping"].int()},
    "slots apart": lambda a: {"slot_mapping": torch.arange(6)[::2]},
}


@cases("what", WRONG)
def test_what_c_would_read_wrongly_is_refused(dtype, what):
    right = arguments(dtype)
    cpu.norm_rope_write(**right)
    with pytest.raises(ValueError, match="it must be"):
        cpu.norm_rope_write(**(right | WRONG[what](right)))


def test_a_slot_outside_the_cache_is_an_error(dtype):
    wrong = arguments(dtype) | {"slot_mapping": torch.tensor([0, 8, 1])}
    with pytest.raises(IndexError, match="A slot is outside the cache, which has 8"):
        cpu.norm_rope_write(**wrong)


def test_a_norm_s_weight_must_fit(dtype):
    x, weight = draw(dtype, 3, 16), draw(dtype, 15)
    for call in (lambda: cpu.rms_norm(x, weight, 1e-5), lambda: cpu.add_rms_norm(x, x, weight, 1)):
        with pytest.raises(ValueError, match="weight is"):
            call()
    with pytest.raises(ValueError, match="residual is"):
        cpu.add_rms_norm(x, x[:2], draw(dtype, 16), 1e-5)
    with pytest.raises(ValueError, match="gate_up is"):
        cpu.silu_mul(draw(dtype, 3, 15))


def test_a_new_thread_has_torch_s_number_of_threads(dtype):
    number = c_library.library({v: k for k, v in ELEMENTS.items()}[dtype]).num_threads
    found = []

    def ask() -> None:
        cpu.silu_mul(torch.zeros(1, 2, dtype=dtype))
        found.append(number())

    for wanted in (3, 1):
        with torch_threads(wanted):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
    assert found == [3, 1]
