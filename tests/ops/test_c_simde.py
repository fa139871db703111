"""The C functions with AVX-512, its BF16 instructions and AMX, emulated by SIMDe: the checks of the
other tests of C, against torch and float64. Quantised products: test_emulated_products.py."""

import pytest
import torch

from minillm.ops import cpu
from tests.ops import c_variants, small_decoders
from tests.ops import test_c_decode as decode
from tests.ops import test_c_layers as layers
from tests.ops import test_c_linear as linear
from tests.ops import test_c_prefill as prefill
from tests.ops import test_c_rows as rows
from tests.ops import test_c_sums as sums
from tests.ops.c_variants import ELEMENTS, EMULATED_PATHS, use, with_threads

pytestmark = pytest.mark.slow


class Library:
    """The functions of an emulated library for one element type."""

    def __init__(self, path: str, element: str):
        self.built, self.dtype = c_variants.emulated(path, element), ELEMENTS[element]
        self.both = self.built, self.dtype


@pytest.fixture(
    scope="module",
    params=[(path, each) for path in EMULATED_PATHS for each in ELEMENTS],
    ids=" ".join,
)
def c(request) -> Library:
    """One library."""
    return Library(*request.param)


def test_products(c):
    panels = linear.Panels(*c.both)
    for n in linear.COUNTS:
        panels.check(n, 96, 33, biased=True)
    linear.test_a_gated_product_is_the_product_and_then_the_gate(panels, 32, biased=True)
    linear.test_nan_stays_in_its_row_or_its_output(panels)
    sums.check_parts(sums.Sums(*c.both), 17, 32, 33, 8)
    x, weight = panels.draw(5, 64), panels.pack(panels.draw(320, 64, seed=1))
    alone = panels.product(x, weight, None, 320)
    with with_threads(c.built, 3):
        assert torch.equal(panels.product(x, weight, None, 320), alone)


def test_rows(c):
    rows.test_norm(c.both, 33)
    rows.test_query_and_cache(c.both, 24, normed=True, interleaved=False)


def test_attention(c):
    attend, prompts = decode.Attend(*c.both), prefill.Attend(c.built, c.dtype)
    for length in (1, 17, 129):
        decode.test_lengths_around_vectors_and_tiles(attend, length)
    for seed in range(3):
        decode.test_it_is_attention(attend, seed)
        prefill.test_it_is_attention(prompts, seed)


def test_all_layers(c, monkeypatch):
    use(monkeypatch, c.built, c.dtype)
    monkeypatch.setenv(cpu.PANELS, "1")
    model = small_decoders.build(
        small_decoders.CONFIGS["qwen3, with norms of heads"], dtype=c.dtype
    )
    layers.test_one_call_is_near_to_float64(model)
