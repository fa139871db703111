"""What a writer of a checkpoint format must provide."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.lab.quantise.making import Made
from minillm.lab.quantise.recipe import Recipe
from minillm.quantization.quantized import Quantized, split_bytes
from minillm.quantization.readers.packed import Field


class Writer(ABC):
    """A checkpoint format for the results of one recipe. `group` is the number of inputs that share
    a scale; 0: whole rows."""

    name: str  # of `--format`

    def __init__(self, recipe: Recipe, group: int):
        self.recipe, self.group = recipe, group

    @abstractmethod
    def scale_dtype(self, model: torch.dtype) -> torch.dtype:
        """The type of stored scales, for a model in this dtype."""

    @abstractmethod
    def tensors(self, made: Made) -> dict[str, Tensor]:
        """The tensors of a quantised matrix, by their names in the checkpoint."""

    def head(self, made: Made) -> dict[str, Tensor]:
        """The tensors of an output matrix of 8 bits, where `Recipe.format` allows one."""
        raise ConfigError(f"The format {self.name} has no place for {made.name} of 8 bits.")

    @abstractmethod
    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of config.json; `ignored` are the names of the linear modules that
        stay in 16 bits."""

    def _named(self, made: Made, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{made.name}.{suffix}": each.contiguous() for suffix, each in tensors.items()}


def packed_tensors(
    fields: Mapping[str, Field], found: Quantized, zero_shift: int = 0
) -> dict[str, Tensor]:
    """The tensors of a format of words, by suffix. Zero points are stored less `zero_shift`."""
    codes, zeros = unsigned(found)
    numbers = {
        "codes": codes,
        "scales": found.scales,
        "zeros": (zeros - zero_shift) & ((1 << found.bits) - 1),
        "index": group_index(found),
    }
    return {each.suffix: each.write(numbers[name], found.bits) for name, each in fields.items()}


def unsigned(found: Quantized) -> tuple[Tensor, Tensor]:
    """Codes [out, in] in the checkpoint's order of inputs, and zero points [out, groups], both from
    0 to 2^bits - 1 as int64."""
    codes = (split_bytes(found.codes) if found.bits == 4 else found.codes).long()
    zeros = torch.zeros_like(found.scales) if found.zeros is None else found.zeros
    shift = 0 if found.bits == 4 else 128
    if found.order is not None:
        codes = codes[:, found.order.argsort()]
    return codes + shift, zeros.long() + shift


def group_index(found: Quantized) -> Tensor:
    """The group of each input, int32 [in], in the checkpoint's order of inputs."""
    places = torch.arange(found.shape[1])
    if found.order is not None:
        places = found.order.argsort()
    return (places // found.group_size).to(torch.int32)
