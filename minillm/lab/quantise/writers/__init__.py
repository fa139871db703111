"""Writers of checkpoint formats, one per file. `WRITERS` lists them by the names of `--format`."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from minillm.lab.quantise.writers.awq import AWQWriter
from minillm.lab.quantise.writers.bitsandbytes import BitsAndBytesWriter
from minillm.lab.quantise.writers.compressed_tensors import CompressedTensorsWriter
from minillm.lab.quantise.writers.fp8 import FP8Writer
from minillm.lab.quantise.writers.gptq import GPTQWriter
from minillm.lab.quantise.writers.writer import Writer

WRITERS: Mapping[str, Callable[..., Writer]] = MappingProxyType(
    {
        "compressed-tensors": CompressedTensorsWriter,
        "gptq": GPTQWriter,
        "awq": AWQWriter,
        "bnb": BitsAndBytesWriter,
        "fp8": FP8Writer,
    }
)
