"""Checkpoint formats, one per file. `READERS` lists them by `quant_method`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from minillm.quantization.formats import Format
from minillm.quantization.gguf.format import GGUF
from minillm.quantization.readers.compressed_tensors import CompressedTensors

READERS: Mapping[str, Callable[..., Format]] = MappingProxyType(
    {"compressed-tensors": CompressedTensors, "gguf": GGUF}
)
