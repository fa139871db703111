"""Writers of checkpoint formats, one per file. `WRITERS` lists them by the names of `--format`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from minillm.quantization.writers.awq import AWQWriter
from minillm.quantization.writers.bitsandbytes import BitsAndBytesWriter
from minillm.quantization.writers.compressed_tensors import CompressedTensorsWriter
from minillm.quantization.writers.fp8 import FP8Writer
from minillm.quantization.writers.gptq import GPTQWriter
from minillm.quantization.writers.writer import Writer

WRITERS: Mapping[str, Callable[..., Writer]] = MappingProxyType(
    {
        "compressed-tensors": CompressedTensorsWriter,
        "gptq": GPTQWriter,
        "awq": AWQWriter,
        "bnb": BitsAndBytesWriter,
        "fp8": FP8Writer,
    }
)
