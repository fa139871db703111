"""Writers of checkpoint formats; `minillm/quantization/readers/` describes the layouts.

| `--format` | methods | activations |
|---|---|---|
| compressed-tensors, pack-quantized | rtn, gptq, awq | 16 bits |
| compressed-tensors, int-quantized | int8, smoothquant | 8 bits, a scale per token |
| compressed-tensors, float-quantized | fp8 | FP8, a scale per token |
| gptq | rtn, gptq, awq; version 1, whose zero points are stored one less | 16 bits |
| awq | rtn, gptq, awq; the "GEMM" version | 16 bits |
| bnb | nf4, int8 | 16 bits; int8: 8 bits |
| fp8 | fp8 in blocks of 128 x 128, as DeepSeek-V3 | FP8 |
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.lab.quantise.making import Made
from minillm.lab.quantise.nf4 import NESTED_BLOCK
from minillm.lab.quantise.recipe import BLOCK, NF4_BLOCK, Recipe
from minillm.quantization.outliers import THRESHOLD
from minillm.quantization.quantized import Quantized, split_bytes
from minillm.quantization.readers.awq import AWQ
from minillm.quantization.readers.compressed_tensors import CompressedTensors
from minillm.quantization.readers.gptq import GPTQ
from minillm.quantization.readers.packed import Field


class Writer(ABC):
    """A checkpoint format for the results of one recipe. `group` is the number of inputs that share
    a scale; 0: whole rows."""

    name: str  # of `--format`
    stored_scales: torch.dtype

    def __init__(self, recipe: Recipe, group: int):
        self.recipe, self.group = recipe, group

    def scale_dtype(self, model: torch.dtype) -> torch.dtype:
        """The type of stored scales, for a model in this dtype."""
        return self.stored_scales

    def tensors(self, made: Made) -> dict[str, Tensor]:
        """The tensors of a quantised matrix, by their names in the checkpoint."""
        return named(made, self._suffixed(made))

    @abstractmethod
    def _suffixed(self, made: Made) -> Mapping[str, Tensor]:
        """The tensors of a quantised matrix, by the last part of their names."""

    def head(self, made: Made) -> dict[str, Tensor]:
        """The tensors of an output matrix of 8 bits, where `Recipe.format` allows one."""
        raise ConfigError(f"The format {self.name} has no place for {made.name} of 8 bits.")

    @abstractmethod
    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of config.json; `ignored` are the names of the linear modules that
        stay in 16 bits."""


class GPTQWriter(Writer):
    """`quant_method: gptq`."""

    name, stored_scales = "gptq", torch.float16

    def _suffixed(self, made: Made) -> Mapping[str, Tensor]:
        """Codes, zero points, scales and the group of each input."""
        return packed_tensors(GPTQ.fields, made.quantized, zero_shift=1)

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


class AWQWriter(Writer):
    """`quant_method: awq`."""

    name, stored_scales = "awq", torch.float16

    def _suffixed(self, made: Made) -> Mapping[str, Tensor]:
        """Codes, zero points and scales."""
        return packed_tensors(AWQ.fields, made.quantized)

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


class FP8Writer(Writer):
    """`quant_method: fp8`."""

    name, stored_scales = "fp8", torch.float32

    def _suffixed(self, made: Made) -> Mapping[str, Tensor]:
        """Codes, and a scale for each block: that of its first row."""
        weights = made.quantized
        return {"weight": weights.codes, "weight_scale_inv": weights.scales[::BLOCK]}

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config`"""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(ignored),
        }


class BitsAndBytesWriter(Writer):
    """`quant_method: bitsandbytes`."""

    name, stored_scales = "bnb", torch.float32

    def _suffixed(self, made: Made) -> Mapping[str, Tensor]:
        """The tensors of a matrix in 4 or 8 bits."""
        weights = made.quantized
        if weights.table is None:
            row = (weights.scales * 127).flatten()
            form = torch.zeros((), dtype=torch.uint8)
            return {"weight": weights.codes, "SCB": row, "weight_format": form}
        swapped = (weights.codes << 4) | (weights.codes >> 4)  # the even element in the high half
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": NF4_BLOCK,
            "dtype": "bfloat16",
            "shape": list(weights.shape),
        }
        tensors = {
            "weight": swapped.reshape(-1, 1),
            "weight.absmax": weights.scales.flatten(),
            "weight.quant_map": weights.table,
        }
        if made.nested is not None:
            nested = made.nested
            state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
            state["nested_offset"] = float(nested.offset)
            tensors["weight.absmax"] = nested.codes
            tensors["weight.nested_absmax"] = nested.scales
            tensors["weight.nested_quant_map"] = nested.table
        text = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        return tensors | {"weight.quant_state.bitsandbytes__nf4": text}

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


class CompressedTensorsWriter(Writer):
    """`quant_method: compressed-tensors`."""

    name = "compressed-tensors"

    def scale_dtype(self, model: torch.dtype) -> torch.dtype:
        """As loaders keep them: the model's type."""
        return torch.float16 if model == torch.float32 else model

    def _suffixed(self, made: Made) -> Mapping[str, Tensor]:
        """Codes, scales, and zero points and the groups of inputs where they are not implied."""
        skipped = {"zeros"} if self.recipe.symmetric else set()
        if made.quantized.order is None:
            skipped.add("index")
        return self._stored(made.quantized, skipped)

    def _stored(self, weights: Quantized, skipped: Set[str]) -> dict[str, Tensor]:
        """The tensors of pack-quantized, except some fields; or of the other two."""
        if not self.recipe.grouped:
            return {"weight": weights.codes, "weight_scale": weights.scales}
        fields = {k: field for k, field in CompressedTensors.fields.items() if k not in skipped}
        return packed_tensors(fields, weights) | {"weight_shape": torch.tensor(weights.shape)}

    def head(self, made: Made) -> dict[str, Tensor]:
        """The tensors of an output matrix of 8 bits, a scale per row; packed if others are."""
        return named(made, self._stored(made.quantized, {"zeros", "index"}))

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config`; `ignored` are the linear modules that stay in 16 bits."""
        number = "float" if self.recipe.method == "fp8" else "int"
        kind, activations = "pack-quantized", None
        if not self.recipe.grouped:
            kind = f"{number}-quantized"
            activations = arguments(8, number, True, "token", None) | {"dynamic": True}
        weights = self._weights(number)
        group: dict[str, Any] = {"targets": ["Linear"], "weights": weights, "format": kind}
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

    def _weights(self, number: str) -> dict[str, Any]:
        strategy, size = ("group", self.group) if self.group else ("channel", None)
        symmetric = self.recipe.symmetric or not self.recipe.grouped
        found = arguments(self.recipe.width, number, symmetric, strategy, size)
        if self.recipe.act_order:
            found["actorder"] = "weight" if self.recipe.static_groups or not self.group else "group"
        return found


KINDS = (CompressedTensorsWriter, GPTQWriter, AWQWriter, BitsAndBytesWriter, FP8Writer)
WRITERS: Mapping[str, Callable[[Recipe, int], Writer]] = MappingProxyType(
    {kind.name: kind for kind in KINDS}
)


def arguments(
    bits: int, number: str, symmetric: bool, strategy: str, group: int | None
) -> dict[str, Any]:
    """The description of quantised numbers by compressed-tensors."""
    return {
        "num_bits": bits,
        "type": number,
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group,
        "dynamic": False,
    }


def named(made: Made, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a matrix by their whole names."""
    return {f"{made.name}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}


def packed_tensors(
    fields: Mapping[str, Field], made: Quantized, zero_shift: int = 0
) -> dict[str, Tensor]:
    """The tensors of a format of words, by suffix. Zero points are stored less `zero_shift`."""
    codes, zeros = unsigned(made)
    numbers = {
        "codes": codes,
        "scales": made.scales,
        "zeros": (zeros - zero_shift) & ((1 << made.bits) - 1),
        "index": group_index(made),
    }
    return {field.suffix: field.write(numbers[name], made.bits) for name, field in fields.items()}


def unsigned(weights: Quantized) -> tuple[Tensor, Tensor]:
    """Codes [out, in] in the checkpoint's order of inputs, and zero points [out, groups], both from
    0 to 2^bits - 1 as int64."""
    codes = (split_bytes(weights.codes) if weights.bits == 4 else weights.codes).long()
    zeros = torch.zeros_like(weights.scales) if weights.zeros is None else weights.zeros
    shift = 0 if weights.bits == 4 else 128
    if weights.order is not None:
        codes = codes[:, weights.order.argsort()]
    return codes + shift, zeros.long() + shift


def group_index(weights: Quantized) -> Tensor:
    """The group of each input, int32 [in], in the checkpoint's order of inputs."""
    places = torch.arange(weights.shape[1])
    if weights.order is not None:
        places = weights.order.argsort()
    return (places // weights.group_size).to(torch.int32)
