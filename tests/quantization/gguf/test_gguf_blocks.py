"""Every GGUF type decoded as the `gguf` package decodes it, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from minillm.gguf.types import TYPES
from minillm.quantization.gguf import blocks
from minillm.quantization.gguf.blocks import DECODERS
from tests.quantization.gguf.export import random_blocks

QUANTISED = [each for each in TYPES.values() if not each.is_plain]


def same_bits(kind, seed=0):
    raw = random_blocks(kind.bytes, 9, 3, seed)
    with np.errstate(all="ignore"):  # random scales include infinities
        expected = gguf.quants.dequantize(raw.reshape(9, -1), gguf.GGMLQuantizationType[kind.name])
    found = DECODERS[kind.name](torch.from_numpy(raw)).dense().numpy()
    equal = expected.view(np.int32) == found.view(np.int32)
    return bool(np.all(equal | (np.isnan(expected) & np.isnan(found))))


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda each: each.name)
def test_decoded_values_are_bit_equal(kind):
    assert all(same_bits(kind, seed) for seed in range(4))


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda each: each.name)
def test_sizes_of_blocks(kind):
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]]
    assert sizes == (kind.weights, kind.bytes)


MISTAKES = {  # a function of blocks.py with a mistake, and a type that shows it
    "nibbles 2j and 2j + 1": (
        "halves",
        lambda p: torch.stack((p & 15, p >> 4), -1).flatten(-2),
        "Q4_0",
    ),
    "high nibble first": ("halves", lambda p: torch.cat((p >> 4, p & 15), -1), "Q4_1"),
    "fifth bits reversed": ("fifth_bits", lambda b, s: fifth(b, s).flip(-1), "Q5_0"),
    "bits of upper planes reversed": ("bit_planes", lambda p, n: planes(p, n).flip(-1), "Q6_K"),
    "minima are scales": ("scales_and_minima", lambda p: small(p)[::-1], "Q4_K"),
    "upper bits of scales left out": (
        "scales_and_minima",
        lambda p: tuple(each & 15 for each in small(p)),
        "Q5_K",
    ),
    "d read first": ("floats", lambda b, start: floats(b, 0), "Q6_K"),
    "scales not multiplied": ("scaled", lambda d, s: s.float().flatten(1), "Q3_K"),
}
fifth, planes, small, floats = (
    blocks.fifth_bits, blocks.bit_planes, blocks.scales_and_minima, blocks.floats,
)  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, monkeypatch):
    name, wrong, kind = MISTAKES[mistake]
    monkeypatch.setattr(blocks, name, wrong)
    assert not same_bits(next(each for each in QUANTISED if each.name == kind))
