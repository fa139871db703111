"""Weight storage of linear layers: layouts, packing and quantisation.

A `Matrix` says which rows and columns of which checkpoint tensors it holds. Its `LinearMethod`
allocates, loads and applies the weight and counts its bytes; other code does not access the
layer's tensors. Packing and quantisation replace the method of a layer instead of subclassing it.

    method                     installed by, when
    PlainLinearMethod          `Matrix`, until another one is
    LoadingMethod              `quantization/`, before a quantised checkpoint is read; then:
      QuantizedMethod            its layout, made dense for each product
      KernelQuantizedMethod      for the kernels of a GPU; StackedQuantizedMethod: experts
      PanelQuantizedMethod       for C; OutlierMethod: with products of large inputs in 16 bits
      MixedMethod                parts of a matrix differ
    RoundedWhileReading        `models/quantize.py`, for the argument `quantization`
    PanelLinearMethod          `models/packing.py`, on a CPU with bf16 or AVX2: for C;
      PanelExpertsMethod         experts, PanelHeadsMethod: what MLA absorbs
    PackedLinearMethod         `models/packing.py`, on other CPUs: for oneDNN
    FixedSumMethod             `models/fixed_sums.py`, in deterministic mode
    RowParallel, VocabularyParallel    `parallel/shard.py`, around another method
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm import ops
from minillm.errors import CheckpointError
from minillm.ops import cpu
from minillm.ops.cpu_sums import panel_sums

ROWS = (1, 2, 4, 8, 16, 64, 256)  # numbers of rows that oneDNN is called with
MOST_PADDED = 16  # remainders up to this size are padded to the next size
PLAIN = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of unquantised weights

Index = tuple[slice, ...]
MergedMatrices = Sequence[tuple[str, Sequence[str]]]  # as in `ModelConfig`


@dataclass(frozen=True)
class TensorSlice:
    """A part of a tensor: the shape of the whole tensor, and a slice per dimension."""

    shape: tuple[int, ...]
    index: Index

    @property
    def held(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(span.stop - span.start for span in self.index)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "TensorSlice":
        """The whole of a tensor of this shape."""
        return cls(tuple(shape), tuple(slice(0, size) for size in shape))


@dataclass(frozen=True)
class CheckpointTensor:
    """A checkpoint tensor: its `name`, the `slice` that is loaded, and the `target` memory.

    `put` stores the loaded slice and may convert it.
    """

    name: str
    target: Tensor
    slice: TensorSlice
    put: Callable[["CheckpointTensor", Tensor], None]

    @classmethod
    def plain(cls, name: str, target: Tensor) -> "CheckpointTensor":
        """A whole tensor that is copied unchanged, such as a norm's weight."""
        return cls(name, target, TensorSlice.whole(target.shape), load_plain)

    def load(self, tensor: Tensor) -> None:
        """Store the part of the tensor that `slice` selects."""
        self.put(self, tensor)


def joined(tensors: Iterable[CheckpointTensor]) -> Iterator[CheckpointTensor]:
    """The tensors of a matrix. Those of one name become one, which is read once and cut."""
    found: dict[str, list[CheckpointTensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.name, []).append(tensor)
    for name, members in found.items():
        if len(members) == 1:
            yield members[0]
            continue
        sides = zip(*(member.slice.index for member in members), strict=True)
        cover = TensorSlice(
            members[0].slice.shape,
            tuple(slice(min(s.start for s in side), max(s.stop for s in side)) for side in sides),
        )
        no_memory = torch.empty(cover.held, device="meta")
        yield CheckpointTensor(name, no_memory, cover, partial(load_members, members))


def load_members(
    members: Sequence[CheckpointTensor], place: CheckpointTensor, whole: Tensor
) -> None:
    """Load the slice of each member from a tensor that covers all."""
    for member in members:
        sides = zip(member.slice.index, place.slice.index, strict=True)
        member.load(whole[tuple(slice(s.start - c.start, s.stop - c.start) for s, c in sides)])


def load_plain(place: CheckpointTensor, tensor: Tensor) -> None:
    """Copy a tensor to its target. Raises CheckpointError if its dtype is not floating-point."""
    if tensor.dtype not in PLAIN:
        raise CheckpointError(
            f"{place.name} is stored as {str(tensor.dtype).removeprefix('torch.')}; "
            f"plain weights are {', '.join(str(kind).removeprefix('torch.') for kind in PLAIN)}."
        )
    if tensor.shape != place.target.shape:  # `copy_` would broadcast
        raise CheckpointError(
            f"{place.name} has shape {list(tensor.shape)}; {list(place.target.shape)} is expected."
        )
    place.target.copy_(tensor)


@dataclass(frozen=True)
class WeightSlice:
    """The rows and columns of a checkpoint matrix [out, in] that a layer holds. The checkpoint
    tensor is `name` plus a suffix by format: ".weight" if unquantised."""

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
        """The slice of a tensor with the matrix's shape."""
        rows, columns = self.rows, self.columns
        index = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        return TensorSlice(self.shape, index)

    @property
    def slice_of_rows(self) -> TensorSlice:
        """The slice of a tensor with one value per row: a bias, or scales."""
        return TensorSlice(self.shape[:1], (slice(self.rows.start, self.rows.stop),))


class Matrix(nn.Module):
    """A weight: parts of checkpoint matrices, concatenated along the outputs [out, in], or stacked
    [copies, out, in].

    `create` allocates it; before that, its parts and its method may be replaced. `is_absorbed`:
    MLA multiplies by it in two ways that are no product of a linear layer (`mla.py`).
    """

    is_absorbed = False

    def __init__(self, parts: Sequence[WeightSlice], copies: int | None = None):
        super().__init__()
        self.parts, self.copies = tuple(parts), copies
        self.method: LinearMethod = PlainLinearMethod()
        self.register_parameter("weight", None)
        self.weight: Tensor

    @property
    def in_features(self) -> int:
        """Number of columns held."""
        return len(self.parts[0].columns)

    @property
    def out_features(self) -> int:
        """Number of rows held, over all copies."""
        return sum(len(part.rows) for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in] or [copies, out, in]"""
        if self.copies is None:
            return self.out_features, self.in_features
        return self.copies, self.out_features // self.copies, self.in_features

    @property
    def num_bytes(self) -> int:
        """Memory of the layer's tensors."""
        return self.method.num_bytes(self)

    def create(self, dtype: torch.dtype, device: torch.device | str) -> None:
        """Allocate the layer's tensors, uninitialised, for a model of this dtype."""
        self.method.create(self, dtype, device)

    def values(self) -> Tensor:
        """The dense matrix, in `shape`, for algorithms that need more than products."""
        return self.method.values(self)

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """All checkpoint tensors of which the layer holds a part."""
        yield from joined(
            tensor
            for part, start in zip(self.parts, self.starts, strict=True)
            for tensor in self.method.checkpoint_tensors(self, part, start)
        )

    @property
    def starts(self) -> list[int]:
        """The first row of each part."""
        stops = accumulate(len(part.rows) for part in self.parts)
        return [stop - len(part.rows) for part, stop in zip(self.parts, stops, strict=True)]


class LinearMethod:
    """How a matrix is stored and applied. Its tensors are parameters or buffers of the layer.

    Layouts that this process packs itself, which no checkpoint contains, do not implement `create`
    and `checkpoint_tensors`.
    """

    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device | str) -> None:
        """Allocate the layer's tensors for `matrix.shape`, in a model that computes in `dtype`."""
        raise RuntimeError(f"{type(self).__name__} cannot allocate a layer.")

    def checkpoint_tensors(
        self, matrix: Matrix, part: WeightSlice, start: int
    ) -> Iterator[CheckpointTensor]:
        """The checkpoint tensors of `part`, whose rows start at row `start` of this matrix (of the
        concatenated copies, for a stack)."""
        raise RuntimeError(f"{part.name} is packed ({type(self).__name__}) and cannot be loaded.")

    def after_loading(self, matrix: Matrix) -> None:
        """Called once, when all tensors of the layer are loaded."""

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [out] -> [N, out]"""
        return ops.linear(x, self.values(matrix), bias)

    def partial(self, matrix: Matrix, x: Tensor) -> Tensor:
        """This rank's partial sum [N, in] -> [N, out], without bias, in the dtype of the
        all-reduce. `finished` turns the reduced sum into the output."""
        return self.apply(matrix, x, None)

    def logits(self, matrix: Matrix, x: Tensor) -> Tensor:
        """[N, in] -> float32 [N, out], not rounded, for routers."""
        return F.linear(x.float(), self.values(matrix).float())

    def lookup(self, matrix: Matrix, ids: Tensor) -> Tensor:
        """Rows at `ids` [N] -> [N, in]"""
        return ops.embedding(ids, self.values(matrix))

    def experts(
        self, gate_up: Matrix, down: Matrix, x: Tensor, weights: Tensor, ids: Tensor, tiled: bool
    ) -> Tensor:
        """MoE layer: x [N, d], experts `ids` [N, k] and their `weights` [N, k] -> [N, d].

        `tiled`: batch-invariant, for deterministic mode.
        """
        run = ops.tiled_moe_experts if tiled else ops.moe_experts
        return run(x, gate_up.values(), down.values(), weights, ids)

    def absorb(self, matrix: Matrix, q: Tensor) -> Tensor:
        """MLA, matrix [H x (Dn + Dv), R]: the product with W_uk^T, [N, H, Dn] -> [N, H, R]."""
        by_head = self.values(matrix).view(q.shape[1], -1, matrix.in_features)
        return torch.einsum("nhd,hdr->nhr", q, by_head[:, : q.shape[2]])

    def expand(self, matrix: Matrix, latents: Tensor, value_dim: int) -> Tensor:
        """MLA: the product with W_uv, [N, H, R] -> [N, H, Dv]."""
        by_head = self.values(matrix).view(latents.shape[1], -1, matrix.in_features)
        return torch.einsum("nhr,hvr->nhv", latents, by_head[:, -value_dim:])

    def values(self, matrix: Matrix) -> Tensor:
        """The dense matrix, [.., out, in]."""
        raise RuntimeError(f"{type(self).__name__} cannot return its weight as a dense matrix.")

    def num_bytes(self, matrix: Matrix) -> int:
        """Memory of the layer's tensors."""
        tensors = (*matrix.parameters(recurse=False), *matrix.buffers(recurse=False))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class PlainLinearMethod(LinearMethod):
    """The weight in the layout of the checkpoint."""

    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device | str) -> None:
        matrix.weight = frozen(torch.empty(matrix.shape, dtype=dtype, device=device))

    def checkpoint_tensors(
        self, matrix: Matrix, part: WeightSlice, start: int
    ) -> Iterator[CheckpointTensor]:
        rows = matrix.weight.data.flatten(0, -2)[start : start + len(part.rows)]
        yield CheckpointTensor(f"{part.name}.weight", rows, part.slice, load_plain)

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        return ops.linear(x, matrix.weight, bias)

    def lookup(self, matrix: Matrix, ids: Tensor) -> Tensor:
        return ops.embedding(ids, matrix.weight)

    def values(self, matrix: Matrix) -> Tensor:
        return matrix.weight


class PanelLinearMethod(LinearMethod):
    """The weight in panels of 32 outputs, in the order in which a product reads them
    (`ops/c/linear.c`). Same size as the plain layout; embedding lookup still works."""

    def __init__(self, out_features: int):
        self.out_features = out_features

    def arranged(self, weight: Tensor) -> Tensor:
        """The weight [out, in] before packing, with a number of inputs that is a multiple of 32."""
        return weight

    def width(self, in_features: int) -> int:
        """Number of inputs of the arranged weight."""
        return in_features

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        return cpu.panel_linear(x, matrix.weight, bias, self.out_features)

    def logits(self, matrix: Matrix, x: Tensor) -> Tensor:
        return panel_sums(x, matrix.weight, self.out_features, 1)

    def lookup(self, matrix: Matrix, ids: Tensor) -> Tensor:
        return cpu.rows_of_panels(matrix.weight, ids, self.out_features)


class PackedLinearMethod(LinearMethod):
    """The weight in oneDNN's packed layout, which `F.linear` would create again in every call.

    Only oneDNN can read it, so it has no embedding lookup. It uses the private operations of
    Inductor; `packed` checks that they work. oneDNN compiles a kernel for each number of rows,
    which takes milliseconds and 0.7 MB. So it is called only with the sizes in `ROWS`: other
    numbers of rows are split into these, and the remainder is padded.
    """

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
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
    """Cut rows into parts of the sizes in `ROWS`: (start, rows, size) of each. Only the last part
    may have fewer rows than its size."""
    start = 0
    while (rest := num_rows - start) > 0:
        small = rest <= MOST_PADDED
        size = min(n for n in ROWS if n >= rest) if small else max(n for n in ROWS if n <= rest)
        yield start, min(size, rest), size
        start += size


def packed(weight: Tensor) -> Tensor | None:
    """A weight [out, in] in oneDNN's packed layout; None if oneDNN is unavailable."""
    onednn = torch.ops.mkldnn
    try:
        result = onednn._reorder_linear_weight(weight, None)
        onednn._linear_pointwise(weight.new_zeros(1, weight.shape[1]), result, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None
    return result


def finished(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The output of a row-parallel product: the reduced sum plus bias, rounded once."""
    return (total if bias is None else total + bias).to(dtype)


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter with `requires_grad=False`."""
    return nn.Parameter(tensor, requires_grad=False)
