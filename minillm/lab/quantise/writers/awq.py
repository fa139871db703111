"""Writes AWQ's "GEMM" version (`readers/awq.py` describes the layout)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.lab.quantise.making import Made
from minillm.lab.quantise.writers.writer import Writer, packed_tensors
from minillm.quantization.readers.awq import AWQ


class AWQWriter(Writer):
    """`quant_method: awq`."""

    name = "awq"

    def scale_dtype(self, model: torch.dtype) -> torch.dtype:
        """float16"""
        return torch.float16

    def tensors(self, made: Made) -> dict[str, Tensor]:
        """Codes, zero points and scales."""
        return self._named(made, packed_tensors(AWQ.fields, made.quantized))

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config`"""
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": self.group or -1,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": list(ignored),
        }
