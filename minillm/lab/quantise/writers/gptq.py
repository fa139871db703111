"""Writes GPTQ, version 1 (`readers/gptq.py` describes the layout): zero points are stored one
less."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.lab.quantise.making import Made
from minillm.lab.quantise.writers.writer import Writer, packed_tensors
from minillm.quantization.readers.gptq import GPTQ


class GPTQWriter(Writer):
    """`quant_method: gptq`."""

    name = "gptq"

    def scale_dtype(self, model: torch.dtype) -> torch.dtype:
        """float16"""
        return torch.float16

    def tensors(self, made: Made) -> dict[str, Tensor]:
        """Codes, zero points, scales and the group of each input."""
        return self._named(made, packed_tensors(GPTQ.fields, made.quantized, zero_shift=1))

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config`"""
        skipped: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in ignored}
        return {
            "quant_method": "gptq",
            "bits": self.recipe.bits,
            "group_size": self.group or -1,
            "sym": self.recipe.symmetric,
            "desc_act": self.recipe.act_order,
            "static_groups": self.recipe.static_groups,
            "damp_percent": self.recipe.damp,
            "true_sequential": False,
            "lm_head": False,
            "checkpoint_format": "gptq",
            "dynamic": skipped,
        }
