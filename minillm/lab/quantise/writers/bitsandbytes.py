"""Writes NF4 and LLM.int8() as bitsandbytes (`readers/bitsandbytes.py` describes the layouts)."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.lab.quantise.making import Made
from minillm.lab.quantise.nf4 import NESTED_BLOCK
from minillm.lab.quantise.recipe import NF4_BLOCK
from minillm.lab.quantise.writers.writer import Writer
from minillm.quantization.outliers import THRESHOLD


class BitsAndBytesWriter(Writer):
    """`quant_method: bitsandbytes`."""

    name = "bnb"

    def scale_dtype(self, model: torch.dtype) -> torch.dtype:
        """float32"""
        return torch.float32

    def tensors(self, made: Made) -> dict[str, Tensor]:
        """The tensors of a matrix in 4 or 8 bits."""
        found = made.quantized
        if found.table is None:
            row = (found.scales * 127).flatten()
            form = torch.zeros((), dtype=torch.uint8)
            return self._named(made, {"weight": found.codes, "SCB": row, "weight_format": form})
        swapped = (found.codes << 4) | (found.codes >> 4)  # the even element in the high half
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": NF4_BLOCK,
            "dtype": "bfloat16",
            "shape": list(found.shape),
        }
        tensors = {
            "weight": swapped.reshape(-1, 1),
            "weight.absmax": found.scales.flatten(),
            "weight.quant_map": found.table,
        }
        if made.nested is not None:
            nested = made.nested
            state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
            state["nested_offset"] = float(nested.offset)
            tensors["weight.absmax"] = nested.codes
            tensors["weight.nested_absmax"] = nested.scales
            tensors["weight.nested_quant_map"] = nested.table
        text = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        tensors["weight.quant_state.bitsandbytes__nf4"] = text
        return self._named(made, tensors)

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config`"""
        four = self.recipe.method == "nf4"
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": four,
            "load_in_8bit": not four,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_use_double_quant": four and self.recipe.double,
            "llm_int8_threshold": THRESHOLD,
            "llm_int8_skip_modules": list(ignored),
        }
