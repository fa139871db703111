"""The bytes of a model's weights in memory, known before it is loaded.

They depend on the format of the checkpoint, on `quantization`, and on the layout that the engine
packs. So the first rows of one matrix of each kind are loaded, quantised and packed as the whole
model will be, and their bytes are counted. All other matrices have the same bytes per row.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from minillm.layers.linear import Embedding
from minillm.layers.linear_methods import Matrix, WeightSlice
from minillm.layers.moe import Router
from minillm.layers.norm import RMSNorm
from minillm.models.checkpoint import ModelSource
from minillm.models.decoder import Decoder
from minillm.models.loader import checked_files, fill
from minillm.models.packing import list_matrices
from minillm.models.quantize import Rounding, rounded_matrices
from minillm.ops.cpu_quantized import PANEL
from minillm.plan.parameters import parameter_count
from minillm.plan.weight_sizes import PARTS, WeightSizes
from minillm.quantization.formats import Format
from minillm.quantization.methods import LoadingMethod, QuantizedMethod, install, to_dense
from minillm.quantization.mixed import members
from minillm.quantization.panels import PanelQuantizedMethod, pack_quantized

ROWS = PANEL  # of a part, of an example
SHARED = ("table", "numbers", "order")  # tensors of the whole matrix
Key = tuple[object, ...]


@dataclass(frozen=True)
class Layout:
    """Where and how a model's weights are held."""

    dtype: torch.dtype  # of activations, and of weights that are not quantised
    device: torch.device
    packed: bool  # whether the engine packs weights (on a CPU)


def planned_sizes(
    source: ModelSource, layout: Layout, quantization: str | None = None, dummy: bool = False
) -> WeightSizes | None:
    """The sizes of a model's weights; None if none of them will be quantised.

    Args:
        quantization: "int8" or "int4", as the engine's argument.
        dummy: whether weights will be random instead of loaded.

    Raises:
        CheckpointError: a tensor is missing, or has a shape that the model does not have.
    """
    format, files = None, list[Path]()
    if source.quantization and not dummy:
        files, format, _ = checked_files(source, layout.dtype)
    if format is None and quantization is None:
        return None
    examples = Examples(source, layout, quantization, format)
    examples.load(files)
    return examples.sizes(quantization or "quantised")


class Examples:
    """A model on the meta device, and for each kind of its matrices the first rows of one."""

    def __init__(
        self, source: ModelSource, layout: Layout, quantization: str | None, format: Format | None
    ):
        self.layout, self.format = layout, format
        self.model = Decoder(source.config, layout.dtype, "meta")
        pairs = rounded_matrices(self.model, quantization) if quantization else ()
        self.roundings: dict[int, Rounding] = {id(matrix): rounding for matrix, rounding in pairs}
        self.by_key: dict[Key, tuple[Matrix, Rounding | None]] = {}
        self.example_of: dict[int, Matrix] = {}
        for matrix in list_matrices(self.model):
            self._add(matrix)

    def _add(self, matrix: Matrix) -> None:
        """Make the example of a matrix, if there is none of its kind."""
        count = len(matrix.parts) // (matrix.copies or 1)  # all experts are alike
        parts = [first_rows(part) for part in matrix.parts[:count]]
        rounding = self.roundings.get(id(matrix))
        key: Key = (rounding, matrix.is_absorbed, *(self._kind(part) for part in parts))
        if key not in self.by_key:
            example = Matrix(parts)
            if self.format is not None:
                example.method = LoadingMethod(self.format, matrix.is_absorbed)
            example.create(self.layout.dtype, "cpu")
            self.by_key[key] = example, rounding
        self.example_of[id(matrix)] = self.by_key[key][0]

    def _kind(self, part: WeightSlice) -> Key:
        """What decides the bytes of a row: the width, and the tensors of the format."""
        if self.format is None or self.format.is_plain(part):
            return (len(part.columns),)
        stored = self.format.tensors(part).items()
        tensors = ((suffix, tensor.slice.held, tensor.dtype) for suffix, tensor in stored)
        return (len(part.columns), *tensors)

    @torch.inference_mode()
    def load(self, files: list[Path]) -> None:
        """Load the examples (random values if there are no files), and bring them into the layout
        of the engine."""
        matrices = [matrix for matrix, _ in self.by_key.values()]
        fill({place.name: place for each in matrices for place in each.checkpoint_tensors()}, files)
        for example, rounding in self.by_key.values():
            example.method.after_loading(example)
            if rounding is not None and not is_quantized(example):
                example.weight.data.normal_()
                install(example, rounding(example.values()), self.layout.dtype)
        if self.layout.packed:
            held = [member for matrix in matrices for member in members(matrix)]
            pack_quantized([member for member in held if is_quantized(member)])
            for member in held:
                to_dense(member)  # what C does not read

    def sizes(self, name: str) -> WeightSizes:
        """The mean bytes of a weight in each part of the model."""
        count = parameter_count(self.model.config)
        sizes = dict.fromkeys(PARTS, 0.0)
        sizes["norms"] = sum(
            module.weight.nbytes for module in self.model.modules() if isinstance(module, RMSNorm)
        )
        for matrix in list_matrices(self.model):
            example = self.example_of[id(matrix)]
            sizes[part_of(matrix, self.model)] += bytes_like(matrix, example)
        means = {part: sizes[part] / max(getattr(count, part), 1) for part in PARTS}
        name = name if self.format is None else self.format.describe()
        return WeightSizes(name, **means, products=self._products())

    def _products(self) -> str | None:
        """ "int8" if products of the layers' matrices round their activations to 8 bits."""
        examples = [self.example_of[id(matrix)] for matrix in list_matrices(self.model.layers)]
        methods = [member.method for example in examples for member in members(example)]
        rounds = any(
            isinstance(each, PanelQuantizedMethod) and not each.numbers.float8 for each in methods
        )
        return "int8" if rounds else None


def first_rows(part: WeightSlice) -> WeightSlice:
    """The first rows of a part, in all its columns."""
    return WeightSlice(part.name, part.shape, part.rows[:ROWS], part.columns)


def is_quantized(matrix: Matrix) -> bool:
    """Whether a loaded matrix, or a member of it, is quantised."""
    kinds = QuantizedMethod | PanelQuantizedMethod
    return any(isinstance(member.method, kinds) for member in members(matrix))


def bytes_like(matrix: Matrix, example: Matrix) -> float:
    """Bytes of a matrix whose rows are stored as those of the example, with its bias."""
    bias = sum(tensor.nbytes for name, tensor in tensors(matrix) if name != "weight")
    parts, counts = members(example), [matrix.out_features]
    if len(parts) > 1:
        rows = iter([len(part.rows) for part in matrix.parts])
        counts = [sum(islice(rows, len(member.parts))) for member in parts]
    return bias + sum(map(bytes_of_rows, counts, parts))


def bytes_of_rows(rows: int, example: Matrix) -> float:
    """Bytes of this many rows that are stored as those of the example."""
    held = example.out_features
    if isinstance(example.method, PanelQuantizedMethod):
        rows, held = (PANEL * math.ceil(count / PANEL) for count in (rows, held))
    parts = dict(tensors(example))
    shared = sum(part.nbytes for name, part in parts.items() if name in SHARED)
    by_row = sum(part.nbytes for name, part in parts.items() if name not in SHARED)
    return shared + by_row * rows / held


def tensors(matrix: Matrix) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a matrix, by name."""
    yield from matrix.named_parameters(recurse=False)
    yield from matrix.named_buffers(recurse=False)


def part_of(matrix: Matrix, model: Decoder) -> str:
    """The part of `ParameterCount` to which a matrix belongs."""
    if isinstance(matrix, Embedding):
        return "embedding"
    if matrix is model.lm_head:
        return "lm_head"
    if isinstance(matrix, Router):
        return "router"
    if matrix.copies is not None:
        return "experts"
    name = matrix.parts[0].name
    if ".self_attn." in name:
        return "attention"
    return "shared_experts" if "shared_expert" in name else "mlp"
