"""Writes compressed-tensors (`readers/compressed_tensors.py` describes the layouts).

| method | format | activations |
|---|---|---|
| rtn, gptq, awq | pack-quantized | 16 bits |
| int8, smoothquant | int-quantized | 8 bits, a scale per token |
| fp8 | float-quantized | FP8, a scale per token |
"""

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor

from minillm.lab.quantise.making import Made
from minillm.lab.quantise.writers.writer import Writer, packed_tensors
from minillm.quantization.quantized import Quantized
from minillm.quantization.readers.compressed_tensors import CompressedTensors


class CompressedTensorsWriter(Writer):
    """`quant_method: compressed-tensors`."""

    name = "compressed-tensors"

    def scale_dtype(self, model: torch.dtype) -> torch.dtype:
        """As loaders keep them: the model's type."""
        return torch.float16 if model == torch.float32 else model

    def tensors(self, made: Made) -> dict[str, Tensor]:
        """Codes, scales, and zero points and the groups of inputs where they are not implied."""
        found = made.quantized
        if not self.recipe.grouped:
            return self.plain(made)
        skipped = {"zeros"} if self.recipe.symmetric else set()
        if found.order is None:
            skipped.add("index")
        return self._named(made, packed(found, skipped))

    def plain(self, made: Made) -> dict[str, Tensor]:
        """The tensors of int-quantized and float-quantized."""
        found = made.quantized
        return self._named(made, {"weight": found.codes, "weight_scale": found.scales})

    def head(self, made: Made) -> dict[str, Tensor]:
        """The tensors of an output matrix of 8 bits, a scale per row; packed if others are."""
        if not self.recipe.grouped:
            return self.plain(made)
        return self._named(made, packed(made.quantized, {"zeros", "index"}))

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config`; `ignored` are the linear modules that stay in 16 bits."""
        kind = "pack-quantized"
        activations = None
        if not self.recipe.grouped:
            number = "float" if self.recipe.method == "fp8" else "int"
            kind = f"{number}-quantized"
            activations = arguments(8, number, True, "token", None) | {"dynamic": True}
        group: dict[str, Any] = {"targets": ["Linear"], "weights": self._weights(), "format": kind}
        group |= {"input_activations": activations, "output_activations": None}
        groups = {"group_0": group}
        if self.recipe.head and self.recipe.grouped:
            weights = arguments(8, "int", True, "channel", None)
            groups["group_1"] = group | {"targets": ["re:.*lm_head"], "weights": weights}
        return {
            "quant_method": "compressed-tensors",
            "format": kind,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(ignored),
            "kv_cache_scheme": None,
        }

    def _weights(self) -> dict[str, Any]:
        number = "float" if self.recipe.method == "fp8" else "int"
        strategy, size = ("group", self.group) if self.group else ("channel", None)
        symmetric = self.recipe.symmetric or not self.recipe.grouped
        found = arguments(self.recipe.width, number, symmetric, strategy, size)
        if self.recipe.act_order:
            found["actorder"] = "weight" if self.recipe.static_groups or not self.group else "group"
        return found


def arguments(
    bits: int, number: str, symmetric: bool, strategy: str, group: int | None
) -> dict[str, Any]:
    """The description of quantised numbers."""
    return {
        "num_bits": bits,
        "type": number,
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group,
        "dynamic": False,
    }


def packed(found: Quantized, skipped: Set[str]) -> dict[str, Tensor]:
    """The tensors of pack-quantized, except some fields."""
    fields = {
        name: field for name, field in CompressedTensors.fields.items() if name not in skipped
    }
    return packed_tensors(fields, found) | {"weight_shape": torch.tensor(found.shape)}
