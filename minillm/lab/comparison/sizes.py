"""Bytes of a model's weights, by kind of tensor.

In memory: codes, scales and offsets as the engine holds them; codes of 2, 3 and 5 to 8 bits take a
byte. On disk: the tensors of a file; for a method the same tensors with codes and zero points at
their own width, which is what a file of it needs. Other tensors count 16 bits.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from minillm.gguf.container import is_gguf
from minillm.lab.comparison.candidates import Opened, layer_matrices, output_matrix
from minillm.layers.linear_methods import Matrix
from minillm.models.checkpoint import ModelSource, shard_headers, weight_files
from minillm.models.decoder import Decoder
from minillm.quantization.formats import Header
from minillm.quantization.methods import QuantizedMethod
from minillm.quantization.mixed import holders

BLOCKS = re.compile(r"q(\d)_(.)")  # GGUF's types of blocks
CODES = ("weight", "qweight", "weight_packed")  # all other tensors of a quantised matrix: scales


@dataclass
class Sizes:
    """Bytes of linear layers (codes, or whole matrices), embedding, output matrix (0 if it is the
    embedding), scales with offsets of all quantised matrices, and all else."""

    linears: float = 0
    embedding: float = 0
    head: float = 0
    scales: float = 0
    other: float = 0

    @property
    def total(self) -> float:
        """All bytes."""
        return self.linears + self.embedding + self.head + self.scales + self.other

    def add(self, kind: str, num_bytes: float) -> None:
        """Count bytes."""
        setattr(self, kind, getattr(self, kind) + num_bytes)

    def as_json(self) -> dict[str, int]:
        """All numbers, in whole bytes."""
        numbers = asdict(self) | {"total": self.total}
        return {name: math.ceil(value) for name, value in numbers.items()}


def memory_sizes(model: Decoder) -> Sizes:
    """Bytes in memory, before panels are packed."""
    sizes = Sizes()
    for kind, matrix in kinds(model):
        if isinstance(matrix.method, QuantizedMethod):
            found = matrix.method.quantized(matrix)
            sizes.add(kind, found.codes.nbytes)
            sizes.add("scales", found.num_bytes - found.codes.nbytes)
        else:
            sizes.add(kind, 2 * math.prod(matrix.shape))
    sizes.other += 2 * other_parameters(model)
    return sizes


def packed_sizes(opened: Opened) -> Sizes:
    """Bytes that a file of a method needs."""
    candidate, model, sizes = opened.candidate, opened.model, Sizes()
    in_layers = {id(each) for each in layer_matrices(model)}
    nested = [made.nested for made in opened.made if made.nested is not None]
    for kind, matrix in kinds(model):
        if not isinstance(matrix.method, QuantizedMethod):
            sizes.add(kind, 2 * math.prod(matrix.shape))
            continue
        found, recipe = matrix.method.quantized(matrix), candidate.recipe
        bits = recipe.width if recipe and id(matrix) in in_layers else found.bits
        sizes.add(kind, math.prod(found.shape) * bits / 8)
        if not (nested and id(matrix) in in_layers):
            sizes.scales += found.scales.nbytes
        if found.zeros is not None and not (recipe and recipe.symmetric):
            sizes.scales += found.zeros.numel() * bits / 8
        if found.order is not None:
            sizes.scales += 4 * found.order.numel()
    sizes.scales += sum(inner.codes.nbytes + inner.scales.nbytes for inner in nested)
    sizes.other += 2 * other_parameters(model)
    return sizes


def kinds(model: Decoder) -> Iterator[tuple[str, Matrix]]:
    """All matrices, with the kind of each; of a mixed one its members."""
    for matrix in holders(model):
        is_head = matrix is model.lm_head
        kind = "head" if is_head else "embedding" if matrix is model.embedding else "linears"
        yield kind, matrix


def other_parameters(model: Decoder) -> int:
    """Numbers outside matrices: norms and biases."""
    return sum(
        parameter.numel()
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if not (isinstance(module, Matrix) and name == "weight")
    )


def disk_sizes(source: ModelSource) -> Sizes:
    """Bytes of all tensors of a checkpoint's files, by their headers."""
    sizes = Sizes()
    for path in weight_files(source):
        if is_gguf(path):
            count_blocks(path, sizes)
            continue
        for name, header in shard_headers(path).items():
            sizes.add(kind_of(name), header_bytes(header))
    return sizes


def count_blocks(path: Path, sizes: Sizes) -> None:
    """Count the tensors of a GGUF file. A block [out, blocks, bytes] of type QB_x has codes of B
    bits, 256 in K types and 32 in others; the rest are scales and minima."""
    for name, header in shard_headers(path).items():
        module, _, kind = name.rpartition(".")
        block = BLOCKS.fullmatch(kind)
        if block is None or header.dtype is None:
            itemsize = 2 if header.dtype is None else header.dtype.itemsize
            sizes.add(kind_of(name), math.prod(header.shape) * itemsize)
            continue
        numbers = 256 if block[2] == "k" else 32
        codes = math.prod(header.shape[:-1]) * numbers * int(block[1]) / 8
        sizes.add(kind_of(f"{module}.weight"), codes)
        sizes.scales += math.prod(header.shape) - codes


def stored_bits(source: ModelSource) -> list[int]:
    """Bits of the codes of a GGUF file's linear layers; empty for other files."""
    names = [name for path in weight_files(source) if is_gguf(path) for name in shard_headers(path)]
    kinds = [name.rpartition(".")[2] for name in names if ".layers." in name]
    return sorted({int(found[1]) for found in map(BLOCKS.fullmatch, kinds) if found})


def kind_of(name: str) -> str:
    """The kind of a tensor by its name in Hugging Face checkpoints."""
    suffix = name.rsplit(".", 1)[-1]
    if "norm" in name or suffix in ("bias", "e_score_correction_bias"):
        return "other"
    if suffix not in CODES:
        return "scales"
    return "embedding" if "embed_tokens" in name else "head" if "lm_head" in name else "linears"


def header_bytes(header: Header) -> int:
    """Bytes of a tensor of a safetensors file."""
    return math.prod(header.shape) * (header.dtype.itemsize if header.dtype else 1)


def bits_per_weight(sizes: Sizes, model: Decoder) -> float:
    """Bits of a weight of the linear layers, with their share of the scales."""
    numbers = {id(m): math.prod(m.shape) for kind, m in kinds(model) if kind == "linears"}
    head = output_matrix(model)
    own = 0.0
    if isinstance(head.method, QuantizedMethod):
        own = head.method.quantized(head).scales.nbytes
    return 8 * (sizes.linears + sizes.scales - own) / sum(numbers.values())
