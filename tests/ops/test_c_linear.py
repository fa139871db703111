"""Products with weights in panels against float64, with bands around every tensor."""

import pytest
import torch
from torch import Tensor

from minillm.layers.linear import Linear
from minillm.linear_methods import PanelLinearMethod, frozen
from minillm.ops import cpu
from tests.ops.c_variants import Guarded, functions, poisoned

BF16 = torch.bfloat16
NAN = float("nan")
COUNTS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 65)


@pytest.fixture(scope="module")
def c() -> cpu.Functions:
    found = functions("native", "BF16")
    if found.panel_product is None:
        pytest.skip("a processor without AMX")
    return found


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return poisoned(torch.randn(*shape, generator=generator).to(BF16))


def pack(c: cpu.Functions, weight: Tensor) -> Tensor:
    panels = Guarded(cpu.panels_shape(*weight.shape), BF16)
    assert c.pack_panels is not None
    c.pack_panels(weight.data_ptr(), panels.inside.data_ptr(), *weight.shape)
    return poisoned(panels.checked())


def product(
    c: cpu.Functions, x: Tensor, panels: Tensor, bias: Tensor | None, out: int, gated: bool = False
) -> Tensor:
    y = Guarded((len(x), out), BF16)
    assert c.panel_product is not None
    c.panel_product(
        x.data_ptr(),
        panels.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.inside.data_ptr(),
        *x.shape,
        out,
        gated,
    )
    return y.checked()


def check(c: cpu.Functions, n: int, size: int, out: int, biased: bool) -> None:
    x, weight = draw(n, size), draw(out, size, seed=1)
    bias = draw(out, seed=2) if biased else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    got = product(c, x, pack(c, weight), bias, out).double()
    torch.testing.assert_close(got, expected, atol=size * 1e-6, rtol=2**-8 + 1e-5)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("out", [1, 31, 32, 33, 100, 192])
@pytest.mark.parametrize("size", [32, 96, 576])
def test_products(c, size, out, biased):
    for n in COUNTS:
        check(c, n, size, out, biased)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("out", [32, 96])
def test_a_gated_product_is_the_product_and_then_the_gate(c, out, biased):
    """Bit for bit: both halves are rounded before the gate, as if they had been stored."""
    weight, bias = draw(2 * out, 64, seed=1), draw(2 * out, seed=2) if biased else None
    panels = pack(c, weight)
    for n in COUNTS:
        x = draw(n, 64)
        both = product(c, x, panels, bias, 2 * out)
        expected = Guarded((n, out), BF16)
        c.silu_mul(both.data_ptr(), expected.inside.data_ptr(), n, out)
        assert torch.equal(product(c, x, panels, bias, out, gated=True), expected.checked())


@pytest.mark.parametrize(("n", "size", "out"), [(1000, 64, 70), (150, 8192, 40), (65, 16384, 33)])
def test_rows_in_several_chunks(c, n, size, out):
    check(c, n, size, out, biased=True)


def test_panels_hold_the_weight(c):
    weight = draw(70, 64)
    panels = pack(c, weight)
    for row in (0, 1, 31, 32, 69):
        for column in (0, 1, 2, 63):
            at = row // 32, column // 2, row % 32, column % 2
            assert panels[at] == weight[row, column]
    assert panels[2, :, 6:].eq(0).all()


def test_an_embedding_s_rows(c):
    """Of tokens that do not exist nothing is written, and they are counted."""
    weight = draw(70, 64)
    panels, ids = pack(c, weight), torch.tensor([0, 69, 31, 32, 5, 70, 5, -1, 2**62])
    out = Guarded((9, 64), BF16)
    assert c.panel_rows is not None
    assert c.panel_rows(panels.data_ptr(), ids.data_ptr(), out.inside.data_ptr(), 9, 64, 70) == 3
    known = torch.tensor([0, 1, 2, 3, 4, 6])
    assert torch.equal(out.checked()[known], weight[ids[known]])
    assert out.inside[[5, 7, 8]].isnan().all()


def test_an_embedding_finds_its_rows(packed):
    weight, panels = packed
    stored = Linear("", weight.shape[1], {"": 70})
    stored.weight = frozen(panels)
    for ids in (torch.tensor([0, 69, 31, 5, 5]), torch.arange(69)[::3], torch.arange(0)):
        assert torch.equal(PanelLinearMethod(70).lookup(stored, ids), weight[ids])
    for bad in (-1, 70, 95, 2**62):
        with pytest.raises(IndexError, match="outside of 0 to 69"):
            PanelLinearMethod(70).lookup(stored, torch.tensor([1, bad]))


def test_a_row_has_the_same_bits_in_every_batch_and_with_every_number_of_threads(c):
    x, panels = draw(100, 96), pack(c, draw(200, 96, seed=1))
    whole, threads = product(c, x, panels, None, 200), torch.get_num_threads()
    for begin, end in ((0, 1), (17, 49), (90, 100)):
        part = poisoned(x[begin:end])
        assert torch.equal(product(c, part, panels, None, 200), whole[begin:end])
    try:
        torch.set_num_threads(3)
        assert torch.equal(product(c, x, panels, None, 200), whole)
    finally:
        torch.set_num_threads(threads)


def test_nan_stays_in_its_row_or_its_output(c):
    x, weight = draw(40, 64), draw(50, 64, seed=1)
    x[17, 5] = NAN
    y = product(c, x, pack(c, weight), None, 50)
    assert y[17].isnan().all()
    assert y.isnan().any(1).sum() == 1
    weight[33, 2] = NAN
    y = product(c, draw(40, 64), pack(c, weight), None, 50)
    assert y[:, 33].isnan().all()
    assert y.isnan().any(0).sum() == 1


def test_products_of_all_sizes_one_after_another(c):
    """A thread keeps the shape of its tiles from one task to the next."""
    panels = {out: pack(c, draw(out, 64, seed=out)) for out in (20, 300)}
    for n in (5, 40, 33, 16, 17, 1, 64, 48):
        x = draw(n, 64)
        for out, each in panels.items():
            alone = torch.cat(
                [product(c, poisoned(x[i : i + 1]), each, None, out) for i in range(n)]
            )
            assert torch.equal(product(c, x, each, None, out), alone)


# ---- through the wrappers ------------------------------------------------------------------------


@pytest.fixture
def packed() -> tuple[Tensor, Tensor]:
    weight = draw(70, 64)
    if not cpu.takes_panels(weight):
        pytest.skip(cpu.describe(BF16))
    panels = torch.empty(cpu.panels_shape(70, 64), dtype=BF16)
    cpu.pack_panels(weight, panels)
    return weight, panels


def test_wrapped(packed):
    weight, panels = packed
    x, bias = draw(9, 128)[:, ::2], draw(70)
    expected = x.double() @ weight.double().T + bias.double()
    got = cpu.panel_linear(x, panels, bias, 70).double()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=2**-8 + 1e-5)


def test_a_weight_that_lies_otherwise_is_packed_all_the_same(packed):
    weight, panels = packed
    again = torch.empty_like(panels)
    cpu.pack_panels(weight.T.contiguous().T, again)
    assert torch.equal(again, panels)


WRONG = {
    "another size": lambda x, panels, bias: (x[:, :32], panels, bias),
    "another type": lambda x, panels, bias: (x.float(), panels, bias),
    "a bias of another type": lambda x, panels, bias: (x, panels, bias.float()),
    "a bias of another size": lambda x, panels, bias: (x, panels, bias[:69]),
    "a bias with gaps": lambda x, panels, bias: (x, panels, bias.repeat(2)[::2]),
    "the weight itself": lambda x, panels, bias: (x, panels.view(96, 64), bias),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_c_would_read_wrongly_is_refused(packed, what):
    x, panels, bias = WRONG[what](draw(3, 64), packed[1], draw(70))
    with pytest.raises(ValueError, match="it must be"):
        cpu.panel_linear(x, panels, bias, 70)


def test_there_are_no_panels_of_float32():
    """What cannot be computed is an error, not uninitialised memory."""
    weight = torch.zeros(32, 32)
    assert not cpu.takes_panels(weight)
    if cpu.functions(torch.float32) is None:
        pytest.skip(cpu.describe(torch.float32))
    panels = torch.zeros(cpu.panels_shape(32, 32))
    with pytest.raises(RuntimeError, match="ask `takes_panels` first"):
        cpu.pack_panels(weight, panels)
    with pytest.raises(RuntimeError, match="ask `takes_panels` first"):
        cpu.panel_linear(weight, panels, None, 32)


@pytest.mark.parametrize("size", [0, 16, 48, 33])
def test_inner_sizes_that_no_tile_has_are_not_taken(size):
    assert not cpu.takes_panels(torch.zeros(32, size, dtype=BF16))
