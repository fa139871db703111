"""How a layer stores a matrix, and what it does with it.

A `Matrix` says which rows and columns of which checkpoint tensors it holds. Its `LinearMethod`
makes the memory, loads those parts, applies them and counts their bytes; nothing else looks into
the layer's tensors. Packing and quantisation replace the method; they never subclass a layer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minillm import ops
from minillm.errors import CheckpointError
from minillm.ops import cpu

ROWS = (1, 2, 4, 8, 16, 64, 256)
MOST_PADDED = 16
PLAIN = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights that are plain numbers

Index = tuple[slice, ...]


@dataclass(frozen=True)
class TensorSlice:
    """A part of a tensor: the shape of the whole, and a slice of each of its dimensions."""

    shape: tuple[int, ...]
    index: Index

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "TensorSlice":
        """All of a tensor of this shape."""
        return cls(tuple(shape), tuple(slice(0, size) for size in shape))


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of the checkpoint by its `name`, what of it is held here, and the memory for that.

    `put` stores what was read of it; a method may convert on the way.
    """

    name: str
    target: Tensor
    slice: TensorSlice
    put: Callable[["CheckpointTensor", Tensor], None]

    @classmethod
    def plain(cls, name: str, target: Tensor) -> "CheckpointTensor":
        """All of a tensor whose numbers are stored as they are, such as a norm's."""
        return cls(name, target, TensorSlice.whole(target.shape), load_plain)

    def load(self, found: Tensor) -> None:
        """Store what was read: the part of the tensor that `slice` names."""
        self.put(self, found)


def load_plain(place: CheckpointTensor, found: Tensor) -> None:
    """Copy numbers to their place; CheckpointError where they are not floating-point numbers."""
    if found.dtype not in PLAIN:
        raise CheckpointError(
            f"{place.name} is stored as {str(found.dtype).removeprefix('torch.')}; "
            f"plain weights are {', '.join(str(each).removeprefix('torch.') for each in PLAIN)}."
        )
    if found.shape != place.target.shape:  # one row would be copied to all of them
        raise CheckpointError(
            f"{place.name} gave {list(found.shape)} for a place of {list(place.target.shape)}."
        )
    place.target.copy_(found)


@dataclass(frozen=True)
class WeightSlice:
    """Rows and columns that a layer holds of a checkpoint matrix [out, in], whose tensors are
    called `name` and a dot and what its format says: "weight" where it is plain."""

    name: str
    shape: tuple[int, int]
    rows: range
    columns: range

    @classmethod
    def whole(cls, name: str, out_features: int, in_features: int) -> "WeightSlice":
        """All rows and columns."""
        shape = out_features, in_features
        return cls(name, shape, range(out_features), range(in_features))

    @property
    def slice(self) -> TensorSlice:
        """The same of a tensor that has the matrix's rows and columns."""
        rows, columns = self.rows, self.columns
        index = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        return TensorSlice(self.shape, index)

    @property
    def slice_of_rows(self) -> TensorSlice:
        """The same of a tensor that has a number for each row: a bias, or scales."""
        return TensorSlice(self.shape[:1], (slice(self.rows.start, self.rows.stop),))


class Matrix(nn.Module):
    """Parts of checkpoint matrices, one below the other: [out, in], or a stack [copies, out, in].

    It has no memory before `create`; until then its parts and its method may be replaced.
    """

    def __init__(self, parts: Sequence[WeightSlice], copies: int | None = None):
        super().__init__()
        self.parts, self.copies = tuple(parts), copies
        self.method: LinearMethod = PlainLinearMethod()
        self.register_parameter("weight", None)
        self.weight: Tensor

    @property
    def in_features(self) -> int:
        """Columns that are held."""
        return len(self.parts[0].columns)

    @property
    def out_features(self) -> int:
        """Rows that are held, those of all copies."""
        return sum(len(part.rows) for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in] or [copies, out, in]"""
        if self.copies is None:
            return self.out_features, self.in_features
        return self.copies, self.out_features // self.copies, self.in_features

    @property
    def num_bytes(self) -> int:
        """Memory that the layer's tensors take."""
        return self.method.num_bytes(self)

    def create(self, dtype: torch.dtype, device: torch.device | str) -> None:
        """Take memory, uninitialised, for the layer's numbers in a model of this dtype."""
        self.method.create(self, dtype, device)

    def values(self) -> Tensor:
        """The matrix as numbers, in `shape`: what no product reads but an algorithm needs."""
        return self.method.values(self)

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """Every checkpoint tensor of which the layer holds a part."""
        start = 0
        for part in self.parts:
            yield from self.method.checkpoint_tensors(self, part, start)
            start += len(part.rows)


class LinearMethod:
    """How a matrix is stored and used. Its tensors are parameters or buffers of the layer.

    A method that stores what no checkpoint has, packed by this process, has neither `create`
    nor `checkpoint_tensors`.
    """

    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device | str) -> None:
        """Give the layer tensors for `matrix.shape`, in a model that computes in `dtype`."""
        raise RuntimeError(f"{type(self).__name__} cannot make the memory of a layer.")

    def checkpoint_tensors(
        self, matrix: Matrix, part: WeightSlice, start: int
    ) -> Iterator[CheckpointTensor]:
        """The tensors that hold `part` in a checkpoint; its rows begin at row `start` here, where
        the copies of a stack are counted as one below the other."""
        raise RuntimeError(f"{type(self).__name__} has packed the weights of {part.name}.")

    def load(self, place: CheckpointTensor, found: Tensor) -> None:
        """Store what was read of one of these tensors: the part that `place.slice` names."""
        load_plain(place, found)

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [out] -> [N, out]"""
        return ops.linear(x, self.values(matrix), bias)

    def partial(self, matrix: Matrix, x: Tensor) -> Tensor:
        """A part of a sum over ranks, without bias, in the dtype in which the ranks add:
        [N, in] -> [N, out]. `finished` makes the output of the sum."""
        return self.apply(matrix, x, None)

    def lookup(self, matrix: Matrix, ids: Tensor) -> Tensor:
        """Rows at `ids` [N] -> [N, in]"""
        return ops.embedding(ids, self.values(matrix))

    def experts(
        self, gate_up: Matrix, down: Matrix, x: Tensor, weights: Tensor, ids: Tensor, tiled: bool
    ) -> Tensor:
        """x [N, d] through its experts `ids` [N, k], with their `weights` [N, k] -> [N, d].

        `tiled`: with bits for a token that do not depend on what is computed beside it.
        """
        run = ops.tiled_moe_experts if tiled else ops.moe_experts
        return run(x, gate_up.values(), down.values(), weights, ids)

    def values(self, matrix: Matrix) -> Tensor:
        """The matrix as numbers, [.., out, in]."""
        raise RuntimeError(f"{type(self).__name__} cannot give the numbers of its matrix back.")

    def num_bytes(self, matrix: Matrix) -> int:
        """Memory of all tensors of the layer."""
        tensors = (*matrix.parameters(recurse=False), *matrix.buffers(recurse=False))
        return sum(each.numel() * each.element_size() for each in tensors)


class PlainLinearMethod(LinearMethod):
    """The weight as the checkpoint has it, applied as the device does it best."""

    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device | str) -> None:
        """One parameter, `weight`."""
        matrix.weight = frozen(torch.empty(matrix.shape, dtype=dtype, device=device))

    def checkpoint_tensors(
        self, matrix: Matrix, part: WeightSlice, start: int
    ) -> Iterator[CheckpointTensor]:
        """One tensor, `name.weight`."""
        rows = matrix.weight.data.flatten(0, -2)[start : start + len(part.rows)]
        yield CheckpointTensor(f"{part.name}.weight", rows, part.slice, self.load)

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [out] -> [N, out]"""
        return ops.linear(x, matrix.weight, bias)

    def lookup(self, matrix: Matrix, ids: Tensor) -> Tensor:
        """[N] -> [N, in]"""
        return ops.embedding(ids, matrix.weight)

    def values(self, matrix: Matrix) -> Tensor:
        """The weight itself."""
        return matrix.weight


class PanelLinearMethod(LinearMethod):
    """The weight in panels of 32 outputs, in the order in which a product reads them
    (`ops/c/linear.c`). The same bytes as before, and an embedding can still read its rows."""

    def __init__(self, out_features: int):
        self.out_features = out_features

    def arranged(self, weight: Tensor) -> Tensor:
        """The weight [out, in] as it goes into panels: its inputs are a multiple of 32."""
        return weight

    def width(self, in_features: int) -> int:
        """How many inputs that are."""
        return in_features

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [out] -> [N, out]"""
        return cpu.panel_linear(x, matrix.weight, bias, self.out_features)

    def lookup(self, matrix: Matrix, ids: Tensor) -> Tensor:
        """[N] -> [N, in]"""
        return cpu.rows_of_panels(matrix.weight, ids, self.out_features)


class PackedLinearMethod(LinearMethod):
    """oneDNN's own layout, which its product wants and `F.linear` would make anew for each call.

    Only oneDNN can read it, so it is none for an embedding. These are the private operations that
    inductor uses; `packed` says whether they work here.
    oneDNN writes a program for every number of rows that it meets, which takes milliseconds, and
    keeps it: 0.7 MB each. So it only ever meets `ROWS`; others are composed of these, and a rest
    is padded.
    """

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [out] -> [N, out]"""
        weight, product = matrix.weight, torch.ops.mkldnn._linear_pointwise.default
        if len(x) in ROWS:
            return product(x, weight, bias, "none", [], "")
        out = x.new_empty(len(x), weight.shape[0])
        for start, count, size in row_parts(len(x)):
            part = x[start : start + count]
            if count < size:
                part = torch.cat((part, x.new_zeros(size - count, x.shape[1])))
            out[start : start + count] = product(part, weight, bias, "none", [], "")[:count]
        return out


def row_parts(num_rows: int) -> Iterator[tuple[int, int, int]]:
    """Cut rows into parts of `ROWS`: where each starts, how many rows it has, and its size, which
    is more only for the last."""
    start = 0
    while (rest := num_rows - start) > 0:
        small = rest <= MOST_PADDED
        size = min(n for n in ROWS if n >= rest) if small else max(n for n in ROWS if n <= rest)
        yield start, min(size, rest), size
        start += size


def packed(weight: Tensor) -> Tensor | None:
    """A weight [out, in] in oneDNN's layout; None where that is not to be had."""
    onednn = torch.ops.mkldnn
    try:
        result = onednn._reorder_linear_weight(weight, None)
        onednn._linear_pointwise(weight.new_zeros(1, weight.shape[1]), result, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None
    return result


def finished(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The output of a product from its sum over all ranks: with the bias, rounded once."""
    return (total if bias is None else total + bias).to(dtype)


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)
