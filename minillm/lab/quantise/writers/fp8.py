"""Writes FP8 in blocks of 128 x 128, as DeepSeek-V3 (`readers/fp8.py` describes the layout)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.lab.quantise.making import Made
from minillm.lab.quantise.recipe import BLOCK
from minillm.lab.quantise.writers.writer import Writer


class FP8Writer(Writer):
    """`quant_method: fp8`."""

    name = "fp8"

    def scale_dtype(self, model: torch.dtype) -> torch.dtype:
        """float32"""
        return torch.float32

    def tensors(self, made: Made) -> dict[str, Tensor]:
        """Codes, and a scale for each block: that of its first row."""
        found = made.quantized
        tensors = {"weight": found.codes, "weight_scale_inv": found.scales[::BLOCK]}
        return self._named(made, tensors)

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config`"""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(ignored),
        }
