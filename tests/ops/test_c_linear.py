"""Products with weights in panels against float64, with bands around every tensor, as compiled for
every kind of processor: tiles (real ones, or written in C), vectors of pairs, and plain C."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.layers.linear import Linear
from minillm.layers.linear_methods import PanelLinearMethod, frozen
from minillm.ops import c_library, cpu
from tests.ops.c_variants import (
    ELEMENTS,
    PRODUCT_PATHS,
    Guarded,
    built,
    parameters,
    poisoned,
    with_threads,
)
from tests.pairs import cases

BF16, F32 = torch.bfloat16, torch.float32
NAN = float("nan")
COUNTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65)
TOLERANCE = {BF16: 2**-8 + 1e-5, F32: 1e-5}
BUILDS = [(path, "BF16") for path in PRODUCT_PATHS]
BUILDS += [(path, "F32") for path in ("native", "AVX2", "baseline")]


@dataclass(frozen=True)
class Panels:
    """The functions of a library, and the type of its elements."""

    c: c_library.Library
    dtype: torch.dtype

    def draw(self, *shape: int, seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return poisoned(torch.randn(*shape, generator=generator).to(self.dtype))

    def pack(self, weight: Tensor) -> Tensor:
        panels = Guarded(cpu.panels_shape(*weight.shape), self.dtype)
        self.c.pack_panels(weight.data_ptr(), panels.inside.data_ptr(), *weight.shape)
        return poisoned(panels.checked())

    def product(
        self, x: Tensor, panels: Tensor, bias: Tensor | None, out: int, gated: bool = False
    ) -> Tensor:
        y = Guarded((len(x), out), self.dtype)
        at = None if bias is None else bias.data_ptr()
        where = x.data_ptr(), panels.data_ptr(), at, y.inside.data_ptr()
        self.c.panel_product(*where, *x.shape, out, gated)
        return y.checked()

    def check(self, n: int, size: int, out: int, biased: bool) -> None:
        x, weight = self.draw(n, size), self.draw(out, size, seed=1)
        bias = self.draw(out, seed=2) if biased else None
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        got = self.product(x, self.pack(weight), bias, out).double()
        close = {"atol": size * 1e-6, "rtol": TOLERANCE[self.dtype]}
        torch.testing.assert_close(got, expected, **close)


@pytest.fixture(scope="module", params=parameters(*BUILDS))
def c(request) -> Panels:
    path, element = request.param
    return Panels(built(path, element), ELEMENTS[element])


SHAPES = [(size, out) for size in (32, 96, 576) for out in (1, 31, 32, 33, 100, 192)]


@cases(
    "size out biased", [(*each, (place + place // 6) % 2 == 0) for place, each in enumerate(SHAPES)]
)
def test_products(c, size, out, biased):
    for n in COUNTS:
        c.check(n, size, out, biased)


@cases("biased", [False, True])
@cases("out", [32, 96])
def test_a_gated_product_is_the_product_and_then_the_gate(c, out, biased):
    """Bit for bit: both halves are rounded before the gate, as if they had been stored."""
    weight, bias = c.draw(2 * out, 64, seed=1), c.draw(2 * out, seed=2) if biased else None
    panels = c.pack(weight)
    for n in COUNTS:
        x = c.draw(n, 64)
        both = c.product(x, panels, bias, 2 * out)
        expected = Guarded((n, out), c.dtype)
        c.c.silu_mul(both.data_ptr(), expected.inside.data_ptr(), n, out)
        assert torch.equal(c.product(x, panels, bias, out, gated=True), expected.checked())


def test_sums_are_rounded_to_the_nearest_even(c):
    """Halfway between two numbers of bf16, and exact in float32."""
    weight = torch.zeros(40, 32)
    weight[:, 0] = 1.0
    weight[:, 31] = torch.arange(40) * 2.0**-8
    x = torch.tensor([[1.0], [-1.0]]).repeat(5, 32)
    got = c.product(x.to(c.dtype), c.pack(weight.to(c.dtype)), None, 40)
    exact = (x.double() @ weight.double().T).float()
    assert torch.equal(got, exact.to(c.dtype))  # torch rounds halves to even


@cases("n size out", [(1000, 64, 70), (150, 8192, 40), (65, 16384, 33)])
def test_rows_in_several_chunks(c, n, size, out):
    c.check(n, size, out, biased=True)


def test_panels_hold_the_weight(c):
    weight = c.draw(70, 64)
    adjacent = 2 if c.dtype == BF16 else 1  # inputs of a row
    panels = c.pack(weight).view(3, -1, 32, adjacent)
    for row in (0, 1, 31, 32, 69):
        for column in (0, 1, 2, 63):
            at = row // 32, column // adjacent, row % 32, column % adjacent
            assert panels[at] == weight[row, column]
    assert panels[2, :, 6:].eq(0).all()


def test_an_embedding_s_rows(c):
    """Of tokens that do not exist nothing is written, and they are counted."""
    weight = c.draw(70, 64)
    panels, ids = c.pack(weight), torch.tensor([0, 69, 31, 32, 5, 70, 5, -1, 2**62])
    out = Guarded((9, 64), c.dtype)
    assert c.c.panel_rows(panels.data_ptr(), ids.data_ptr(), out.inside.data_ptr(), 9, 64, 70) == 3
    known = torch.tensor([0, 1, 2, 3, 4, 6])
    assert torch.equal(out.checked()[known], weight[ids[known]])
    assert out.inside[[5, 7, 8]].isnan().all()


def test_a_row_has_the_same_bits_in_every_batch_and_with_every_number_of_threads(c):
    x, panels = c.draw(100, 96), c.pack(c.draw(200, 96, seed=1))
    whole = c.product(x, panels, None, 200)
    for begin, end in ((0, 1), (17, 49), (90, 100)):
        part = poisoned(x[begin:end])
        assert torch.equal(c.product(part, panels, None, 200), whole[begin:end])
    for count in (2, 3, 4):
        with with_threads(c.c, count):
            assert torch.equal(c.product(x, panels, None, 200), whole)


def test_nan_stays_in_its_row_or_its_output(c):
    x, weight = c.draw(40, 64), c.draw(50, 64, seed=1)
    x[17, 5] = NAN
    y = c.product(x, c.pack(weight), None, 50)
    assert y[17].isnan().all()
    assert y.isnan().any(1).sum() == 1
    weight[33, 2] = NAN
    y = c.product(c.draw(40, 64), c.pack(weight), None, 50)
    assert y[:, 33].isnan().all()
    assert y.isnan().any(0).sum() == 1


def test_products_of_all_sizes_one_after_another(c):
    """A thread keeps the shape of its tiles from one task to the next."""
    panels = {out: c.pack(c.draw(out, 64, seed=out)) for out in (20, 300)}
    for n in (5, 40, 33, 16, 17, 1, 64, 48):
        x = c.draw(n, 64)
        for out, each in panels.items():
            alone = torch.cat(
                [c.product(poisoned(x[i : i + 1]), each, None, out) for i in range(n)]
            )
            assert torch.equal(c.product(x, each, None, out), alone)


# ---- through the wrappers ------------------------------------------------------------------------


def draw(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture(params=[BF16, F32], ids=str)
def packed(request) -> tuple[Tensor, Tensor]:
    if cpu.functions(request.param) is None:
        pytest.skip(cpu.describe(request.param))
    weight = draw(70, 64, dtype=request.param)
    panels = torch.empty(cpu.panels_shape(70, 64), dtype=weight.dtype)
    cpu.pack_panels(weight, panels)
    return weight, panels


def test_wrapped(packed):
    weight, panels = packed
    x, bias = draw(9, 128, dtype=weight.dtype)[:, ::2], draw(70, dtype=weight.dtype)
    expected = x.double() @ weight.double().T + bias.double()
    got = cpu.panel_linear(x, panels, bias, 70).double()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=TOLERANCE[weight.dtype])


def test_an_embedding_finds_its_rows(packed):
    weight, panels = packed
    stored = Linear("", weight.shape[1], {"": 70})
    stored.weight = frozen(panels)
    for ids in (torch.tensor([0, 69, 31, 5, 5]), torch.arange(69)[::3], torch.arange(0)):
        assert torch.equal(PanelLinearMethod(70).lookup(stored, ids), weight[ids])
    for bad in (-1, 70, 95, 2**62):
        with pytest.raises(IndexError, match="outside of 0 to 69"):
            PanelLinearMethod(70).lookup(stored, torch.tensor([1, bad]))


WRONG = {
    "another size": lambda x, panels, bias: (x[:, :32], panels, bias),
    "another type": lambda x, panels, bias: (x.half(), panels, bias),
    "a bias of another type": lambda x, panels, bias: (x, panels, bias.half()),
    "a bias of another size": lambda x, panels, bias: (x, panels, bias[:69]),
    "a bias with gaps": lambda x, panels, bias: (x, panels, bias.repeat(2)[::2]),
    "the weight itself": lambda x, panels, bias: (x, panels.view(96, 64), bias),
}


@cases("what", WRONG)
def test_what_c_would_read_wrongly_is_refused(packed, what):
    dtype = packed[1].dtype
    x, panels, bias = WRONG[what](draw(3, 64, dtype=dtype), packed[1], draw(70, dtype=dtype))
    with pytest.raises(ValueError, match="it must be"):
        cpu.panel_linear(x, panels, bias, 70)


WRONG_WEIGHTS = {
    "a size that is not whole pairs": (torch.zeros(70, 63), (3, 31, 32, 2)),
    "panels of another size": (torch.zeros(70, 64), (3, 31, 32, 2)),
    "panels of another type": (torch.zeros(70, 64), None),
}


@pytest.mark.parametrize("what", WRONG_WEIGHTS)
def test_what_c_would_pack_wrongly_is_refused(what):
    weight, shape = WRONG_WEIGHTS[what]
    panels = torch.empty(3, 32, 32, 2, dtype=BF16) if shape is None else torch.empty(shape)
    with pytest.raises(ValueError, match="it must be"):
        cpu.pack_panels(weight, panels)


# ---- where weights are kept in panels ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_the_environment_decides(dtype, monkeypatch):
    found, weight = cpu.functions(dtype), torch.zeros(32, 32, dtype=dtype)
    monkeypatch.setenv(cpu.PANELS, "0")
    assert not cpu.takes_panels(weight)
    assert "products" not in cpu.describe(dtype)
    monkeypatch.setenv(cpu.PANELS, "1")
    assert cpu.takes_panels(weight) == (found is not None)
    assert ("products" in cpu.describe(dtype)) == (found is not None)
    for nothing in ("", None):
        if nothing is None:
            monkeypatch.delenv(cpu.PANELS)
        else:
            monkeypatch.setenv(cpu.PANELS, nothing)
        assert cpu.takes_panels(weight) == (found is not None and found.panel_unit() > 0)


def test_another_wish_is_an_error(monkeypatch):
    monkeypatch.setenv(cpu.PANELS, "yes")
    with pytest.raises(ConfigError, match=r"^MINILLM_PANELS is 'yes'; it must be 0 \(never\)"):
        cpu.takes_panels(torch.zeros(32, 32))


@pytest.mark.parametrize("build", parameters(*product(("tiles in C", "no tiles", "AVX2"))))
def test_what_multiplies_is_named(build, monkeypatch):
    monkeypatch.setenv(cpu.PANELS, "1")
    found = built(build, "BF16")
    name = {"tiles in C": "AMX", "no tiles": "AVX-512 BF16"}.get(build, build)
    assert cpu.UNITS[found.panel_unit()] == name
    if cpu.functions(BF16) is not None:
        monkeypatch.setattr(cpu, "functions", lambda dtype: found)
        assert cpu.describe(BF16) == f"C functions of our own, {name} products"


@pytest.mark.parametrize("size", [0, 16, 48, 33])
def test_inner_sizes_that_no_tile_has_are_not_taken(size, monkeypatch):
    monkeypatch.setenv(cpu.PANELS, "1")
    assert not cpu.takes_panels(torch.zeros(32, size, dtype=BF16))


def test_types_without_c_functions_are_not_packed():
    with pytest.raises(RuntimeError, match=r"no C functions for torch\.float64"):
        cpu.pack_panels(torch.zeros(32, 32).double(), torch.zeros(1, 16, 32, 2).double())
