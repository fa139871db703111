"""What a rank computes has the bits of the whole: parts of sums, some outputs, some heads, some
units. As compiled for every kind of processor."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from minillm.layers.linear_methods import finished
from minillm.ops import cpu, cpu_sums
from minillm.parallel.communicator import tree_sum
from tests.ops.c_variants import ELEMENTS, PATHS, Guarded, built, parameters, poisoned, with_threads
from tests.ops.test_c_decode import Attend
from tests.ops.test_c_linear import BUILDS, F32, NAN, Panels
from tests.ops.test_c_prefill import make_batch

COUNTS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 65)


@dataclass(frozen=True)
class Sums(Panels):
    """The functions of a library, `panel_sums` among them."""

    def sums(self, x: Tensor, panels: Tensor, out: int, parts: int) -> Tensor:
        y = Guarded((len(x), out), F32)
        where = x.data_ptr(), panels.data_ptr(), y.inside.data_ptr()
        self.c.panel_sums(*where, *x.shape, out, parts)
        return y.checked()

    def of_columns(self, x: Tensor, weight: Tensor, columns: slice, parts: int) -> Tensor:
        """What a rank that holds these columns gets."""
        panels = self.pack(poisoned(weight[:, columns]))
        return self.sums(poisoned(x[:, columns]), panels, len(weight), parts)


@pytest.fixture(scope="module", params=parameters(*BUILDS))
def c(request) -> Sums:
    path, element = request.param
    return Sums(built(path, element), ELEMENTS[element])


def check_parts(c: Sums, count: int, size: int, out: int, parts: int) -> None:
    """All parts at once, and each by itself and then added."""
    x, weight = c.draw(count, parts * size), c.draw(out, parts * size, seed=1)
    whole = c.sums(x, c.pack(weight), out, parts)
    cuts = [slice(part * size, (part + 1) * size) for part in range(parts)]
    alone = torch.stack([c.of_columns(x, weight, each, 1) for each in cuts])
    assert torch.equal(whole, tree_sum(alone))
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(whole, expected, atol=parts * size * 1e-6, rtol=1e-5)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize(("size", "out"), [(32, 33), (96, 100)])
def test_parts_are_added_as_a_tree(c, parts, size, out):
    for count in COUNTS:
        check_parts(c, count, size, out, parts)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_that_hold_subtrees_get_the_sum_of_one(c, ranks):
    for count in (1, 8, 40):
        x, weight = c.draw(count, 8 * 64), c.draw(70, 8 * 64, seed=1)
        whole, share = c.sums(x, c.pack(weight), 70, 8), 8 * 64 // ranks
        held = [
            c.of_columns(x, weight, slice(rank * share, (rank + 1) * share), 8 // ranks)
            for rank in range(ranks)
        ]
        assert torch.equal(tree_sum(torch.stack(held)), whole)
        assert not torch.equal(c.sums(x, c.pack(weight), 70, 1), whole)  # it does matter


def test_a_finished_sum_is_the_product(c):
    """The bias comes before the only rounding, and the rounding is C's, as far as infinity."""
    x, weight, bias = c.draw(40, 64), c.draw(70, 64, seed=1), c.draw(70, seed=2)
    x[3, 5], x[4, 5], x[5] = NAN, float("inf"), 1e-30
    panels = c.pack(weight)
    for each in (None, bias):
        got = finished(c.sums(x, panels, 70, 1), each, c.dtype)
        torch.testing.assert_close(
            got, c.product(x, panels, each, 70), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("count_of_threads", [1, 2, 3])
def test_an_output_depends_on_its_rows_alone(c, count_of_threads):
    """Any outputs of any rows, with any number of threads: the bits of all of them together."""
    x, weight = c.draw(40, 96), c.draw(200, 96, seed=1)
    whole, total = c.product(x, c.pack(weight), None, 200), c.sums(x, c.pack(weight), 200, 1)
    with with_threads(c.c, count_of_threads):
        for count in range(1, 41):
            low = 7 * count % 150
            held = slice(low, low + 1 + 5 * count % 50)
            rows = poisoned(x[40 - count :])
            panels, out = c.pack(poisoned(weight[held])), held.stop - held.start
            assert torch.equal(c.product(rows, panels, None, out), whole[40 - count :, held])
            assert torch.equal(c.sums(rows, panels, out, 1), total[40 - count :, held])
            assert torch.equal(c.sums(rows, panels, out, 1), c.sums(rows, panels, out, 1))


@pytest.mark.parametrize("path", parameters(*product(PATHS)))
@pytest.mark.parametrize("element", ELEMENTS)
def test_a_gate_has_the_same_bits_among_fewer_units(path, element):
    """Also behind the last whole vector of a row."""
    found, dtype = built(path, element), ELEMENTS[element]
    gate, up = torch.randn(2, 5, 203, generator=torch.Generator().manual_seed(0)).to(dtype)

    def gated(units: slice) -> Tensor:
        both = poisoned(torch.cat((gate[:, units], up[:, units]), 1))
        out = Guarded((5, both.shape[1] // 2), dtype)
        found.silu_mul(both.data_ptr(), out.inside.data_ptr(), *out.inside.shape)
        return out.checked()

    whole = gated(slice(None))
    for width in range(1, 41):
        units = slice(4 * width, 5 * width)
        assert torch.equal(gated(units), whole[:, units])


@pytest.mark.parametrize("path", parameters(*product(PATHS)))
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("window", [None, 50])
def test_a_query_has_the_same_bits_among_fewer_heads(path, element, window):
    """Six query heads share a KV head; a rank has some of them, or one of the KV heads."""
    attend = Attend(built(path, element), ELEMENTS[element])
    batch = make_batch(attend.dtype, [7, 300, 1100], [1, 2, 1], 2, 6, 32, window=window)
    whole = attend(batch)
    for head in range(2):
        kv = slice(head, head + 1)
        for first, last in ((0, 6), (0, 3), (3, 6), (1, 2), (4, 6)):
            held = slice(6 * head + first, 6 * head + last)
            part = replace(
                batch,
                q=poisoned(batch.q[:, held]),
                k_cache=batch.k_cache[:, kv],
                v_cache=batch.v_cache[:, kv],
            )
            assert torch.equal(attend(part), whole[:, held])


# ---- through the wrapper -------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 72, 96, 256, 1000])
def test_parts_of_any_width(dtype, width):
    """Behind each stand zeros up to a multiple of 32."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, width, generator=generator).to(dtype) for n in (9, 70))
    for parts in (1, 2, 4, 8):
        wide = cpu_sums.with_zeros(weight, parts)
        assert wide.shape[1] == parts * cpu_sums.padded_part(width, parts)
        panels = torch.empty(cpu.panels_shape(*wide.shape), dtype=dtype)
        cpu.pack_panels(wide, panels)
        got = cpu_sums.panel_sums(x, panels, 70, parts)
        expected = (x.double() @ weight.double().T).float()
        torch.testing.assert_close(got, expected, atol=width * 1e-6, rtol=1e-5)


def test_what_does_not_fit_is_refused(dtype):
    panels = torch.zeros(cpu.panels_shape(70, 256), dtype=dtype)
    for parts in (0, 3, 16):
        with pytest.raises(ValueError, match="there can be 1, 2, 4 or 8"):
            cpu_sums.panel_sums(torch.zeros(2, 256, dtype=dtype), panels, 70, parts)
    with pytest.raises(ValueError, match="260 inputs cannot be split into 8 parts"):
        cpu_sums.panel_sums(torch.zeros(2, 260, dtype=dtype), panels, 70, 8)
    for x in (torch.zeros(2, 512, dtype=dtype), torch.zeros(2, 256, dtype=torch.float16)):
        with pytest.raises(ValueError, match="does not fit panels"):
            cpu_sums.panel_sums(x, panels, 70, 8)
