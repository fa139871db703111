"""Writes AWQ's "GEMM" version (`readers/awq.py` describes the layout)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.lab.quantise.making import Made
from minillm.lab.quantise.writers.writer import Writer, pack_words, padded, unsigned
from minillm.quantization.integers import AWQ_ORDER


class AWQWriter(Writer):
    """`quant_method: awq`."""

    name = "awq"

    def scale_dtype(self, model: torch.dtype) -> torch.dtype:
        """float16"""
        return torch.float16

    def tensors(self, made: Made) -> dict[str, Tensor]:
        """Codes and zero points packed along outputs, transposed."""
        codes, zeros = unsigned(made.quantized)
        tensors = {
            "qweight": pack_words(padded(codes.T, 8), 4, AWQ_ORDER),
            "qzeros": pack_words(padded(zeros.T, 8), 4, AWQ_ORDER),
            "scales": made.quantized.scales.T,
        }
        return self._named(made, tensors)

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
