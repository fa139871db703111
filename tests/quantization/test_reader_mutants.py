"""Deliberate mistakes in the readers, each of which the golden files find."""

from dataclasses import replace

import pytest
import torch

from minillm.quantization import grouping
from minillm.quantization.quantized import Quantized
from minillm.quantization.readers import awq, bitsandbytes, gptq, packed, scales
from tests.quantization.test_golden import compare

DENSE = Quantized.dense
ARRANGED = grouping.arranged
ABSMAX = bitsandbytes.BitsAndBytes.absmax
BY_ROW = scales.ScaleBlocks.by_row


def zeros_of_version_2(self, part, stored, codes, index):
    return stored


def one_group_on(index, values, zeros, codes, store):
    return ARRANGED(index, values.roll(1, 1), zeros, codes, store)


def in_order(index, values, zeros, codes, store):
    return ARRANGED(index.sort()[0], values, zeros, codes, store)


def order_not_kept(index, values, zeros, codes, store):
    return replace(ARRANGED(index, values, zeros, codes, store), order=None)


def unsigned_scales(self, dtype=torch.float32):
    return DENSE(replace(self, scales=self.scales.abs()), dtype)


def zeros_not_used(self, dtype=torch.float32):
    return DENSE(replace(self, zeros=None), dtype)


def halves_swapped(self, dtype=torch.float32):
    return DENSE(replace(self, codes=(self.codes >> 4) | (self.codes << 4)), dtype)


def no_offset(self, part, found, state, start):
    return ABSMAX(self, part, found, {**state, "nested_offset": 0.0}, start)


def divided(self, found):
    values, index = BY_ROW(self, found)
    return 1 / values, index


def rows_of_one_block(self, found):
    values, index = BY_ROW(self, found)
    return values[:1].expand_as(values).contiguous(), index


def columns_of_one_block(self, found):
    values, index = BY_ROW(self, found)
    return values, index * 0


def signed_codes(codes, values, zeros):
    return grouping.signed_bits((codes ^ 8).to(torch.int8), values, zeros)


def blocks_per_row(codes, absmax, table, shape, block):
    """Blocks that start again in every row, as if rows were padded."""
    numbers = torch.stack((codes >> 4, codes & 15), dim=-1).flatten().view(shape)
    per_row = -(-shape[1] // block)
    return table[numbers.long()] * absmax[:per_row].repeat_interleave(block)[: shape[1]]


def awq_fields(order):
    """The tensors of AWQ with another order in words."""
    fields = awq.AWQ.fields
    return {k: replace(v, order=order) if v.packed else v for k, v in fields.items()}


MUTANTS = {  # where, name, mistake, golden folder
    "zero point without + 1": (gptq.GPTQ, "zero_points", zeros_of_version_2, "gptq-asym"),
    "scale of the next group": (packed, "arranged", one_group_on, "gptq-sym"),
    "g_idx ignored": (packed, "arranged", in_order, "gptq-order"),
    "order of inputs lost": (packed, "arranged", order_not_kept, "gptq-v2-order"),
    "scales unsigned": (Quantized, "dense", unsigned_scales, "gptq-sym"),
    "zero points left out": (Quantized, "dense", zeros_not_used, "pack-asym"),
    "the first code in the low half": (Quantized, "dense", halves_swapped, "nf4"),
    "AWQ order not undone": (awq.AWQ, "fields", awq_fields(range(8)), "awq"),
    "AWQ order inverted twice": (awq.AWQ, "fields", awq_fields((0, 2, 4, 6, 1, 3, 5, 7)), "awq"),
    "offset of double quantisation": (bitsandbytes.BitsAndBytes, "absmax", no_offset, "nf4-double"),
    "blocks restart in each row": (bitsandbytes, "crossing", blocks_per_row, "nf4"),
    "weight_scale_inv divided": (scales.ScaleBlocks, "by_row", divided, "fp8-block"),
    "blocks of rows": (scales.ScaleBlocks, "by_row", rows_of_one_block, "fp8-block"),
    "blocks of columns": (scales.ScaleBlocks, "by_row", columns_of_one_block, "float-block"),
    "codes are signed": (packed, "few_bits", signed_codes, "pack-sym"),
}


@pytest.mark.mutation
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name, monkeypatch):
    place, attribute, mistake, folder = MUTANTS[name]
    compare(folder)
    monkeypatch.setattr(place, attribute, mistake)
    with pytest.raises(AssertionError):
        compare(folder)
