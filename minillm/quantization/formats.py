"""Checkpoint formats of quantised matrices.

`quantization_config` of config.json names a format. The headers of the weight files decide for each
matrix whether it is quantised: a matrix with `name.weight` in a floating-point type is not.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm.errors import CheckpointError, UnsupportedFeatureError, did_you_mean
from minillm.layers.linear_methods import PLAIN, TensorSlice, WeightSlice
from minillm.quantization.quantized import Quantized


@dataclass(frozen=True)
class Header:
    """A tensor of a weight file, before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: a type that no format uses


Headers = Mapping[str, Header]


@dataclass(frozen=True)
class Stored:
    """A tensor that a format stores for a part: the held slice, and its type in memory (None: the
    model's dtype)."""

    slice: TensorSlice
    dtype: torch.dtype | None


class Format(ABC):
    """How a checkpoint stores quantised matrices. One instance describes one checkpoint."""

    def __init__(self, settings: Mapping[str, Any], headers: Headers):
        self.settings, self.headers = settings, headers

    def tensors(self, part: WeightSlice) -> dict[str, Stored]:
        """The tensors of a part, by their suffix after `part.name`. Raises CheckpointError if the
        held rows and columns cannot be cut out of the packed tensors."""
        if self.is_plain(part):
            return {"weight": Stored(part.slice, None)}
        return self.packed(part)

    def decode(self, part: WeightSlice, tensors: Mapping[str, Tensor]) -> Quantized | Tensor:
        """The part from its tensors: quantised, or dense if it is not quantised in the file or this
        engine has no resident form for it."""
        if self.is_plain(part):
            return tensors["weight"]
        return self.decode_packed(part, tensors)

    def is_plain(self, part: WeightSlice) -> bool:
        """Whether the file holds this part in 16 or 32 bits."""
        header = self.headers.get(f"{part.name}.weight")
        return header is not None and header.dtype in PLAIN

    def header(self, part: WeightSlice, suffix: str) -> Header:
        """The header of a tensor. Raises CheckpointError if the file does not have it."""
        header = self.headers.get(f"{part.name}.{suffix}")
        if header is None:
            raise CheckpointError(
                f"{part.name} is quantised ({self.describe()}), but the files have no tensor "
                f"{part.name}.{suffix}."
            )
        return header

    def scales(self, part: WeightSlice, suffix: str) -> Header:
        """The header of a tensor of scales. Raises CheckpointError unless it holds floating-point
        numbers, at least one."""
        header = self.header(part, suffix)
        if header.dtype not in PLAIN or 0 in header.shape:
            dtype = "another type" if header.dtype is None else str(header.dtype)[6:]
            raise CheckpointError(
                f"{part.name}.{suffix} is {dtype} {list(header.shape)}; scales are floating-point "
                "numbers, at least one."
            )
        return header

    def has(self, part: WeightSlice, suffix: str) -> bool:
        """Whether the files have a tensor."""
        return f"{part.name}.{suffix}" in self.headers

    @property
    def promises_codes(self) -> bool:
        """Whether the settings say that some matrix is quantised."""
        return True

    @property
    def threshold(self) -> float:
        """Inputs of at least this magnitude are multiplied in 16 bits by products that round inputs
        to 8 bits; 0: none."""
        return 0.0

    def is_unused(self, name: str) -> bool:
        """Whether a tensor that the model has no place for may be left out."""
        return False

    def is_zero(self, name: str) -> bool:
        """Whether a tensor may be left out if all its values are 0."""
        return False

    @abstractmethod
    def packed(self, part: WeightSlice) -> dict[str, Stored]:
        """`tensors` of a quantised part."""

    @abstractmethod
    def decode_packed(self, part: WeightSlice, tensors: Mapping[str, Tensor]) -> Quantized | Tensor:
        """`decode` of a quantised part."""

    @abstractmethod
    def describe(self) -> str:
        """The format in a few words, such as "GPTQ, 4 bits, groups of 128"."""


def setting(settings: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    """A value of `quantization_config`; `default` if it is absent or null. Raises CheckpointError
    if it is of another type."""
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CheckpointError(
            f"quantization_config gives {name} as {value!r}; it must be of type {kind.__name__}."
        )
    return value


def units(part: WeightSlice, held: range, total: int, unit: int) -> slice:
    """`held` of `total` rows or columns, in units; the last unit of all may be incomplete."""
    if held.start % unit or (held.stop % unit and held.stop != total):
        raise CheckpointError(
            f"{part.name} is quantised in groups of {unit}, which ranks cannot share: one would "
            f"hold {held.start} to {held.stop - 1} of {total}; use a smaller tensor_parallel_size."
        )
    return slice(held.start // unit, -(-held.stop // unit))


def format_of(
    settings: Mapping[str, Any], headers: Headers, known: Mapping[str, Callable[..., Format]]
) -> Format:
    """The format that `quantization_config` names.

    Raises:
        UnsupportedFeatureError: the method is not one of `known`.
    """
    method = str(settings.get("quant_method", "unknown"))
    if method not in known:
        raise UnsupportedFeatureError(
            f"config.json says quant_method {method!r}; this version reads {', '.join(known)}."
            f"{did_you_mean(method, known)}"
        )
    return known[method](settings, headers)
