"""Writers of checkpoint formats, one per file. `WRITERS` lists them by the names of `--format`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from minillm.quantization.writers.compressed_tensors import CompressedTensorsWriter
from minillm.quantization.writers.writer import Writer

WRITERS: Mapping[str, Callable[..., Writer]] = MappingProxyType(
    {"compressed-tensors": CompressedTensorsWriter}
)
