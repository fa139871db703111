"""Checkpoint formats, one per file. `READERS` lists them by `quant_method`."""

from collections.abc import Callable, Mapping

from minillm.quantization.formats import Format
from minillm.quantization.gguf.format import GGUF
from minillm.quantization.readers.awq import AWQ
from minillm.quantization.readers.bitsandbytes import BitsAndBytes
from minillm.quantization.readers.compressed_tensors import CompressedTensors
from minillm.quantization.readers.fp8 import FP8
from minillm.quantization.readers.gptq import GPTQ

READERS: Mapping[str, Callable[..., Format]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": GPTQ,
    "awq": AWQ,
    "bitsandbytes": BitsAndBytes,
    "fp8": FP8,
    "gguf": GGUF,
}
