"""The `LinearMethod`s of quantised matrices: while a checkpoint is read, and afterwards."""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from minillm import ops
from minillm.errors import CheckpointError
from minillm.layers.linear_methods import (
    CheckpointTensor,
    LinearMethod,
    Matrix,
    PlainLinearMethod,
    WeightSlice,
    frozen,
)
from minillm.quantization.formats import Format
from minillm.quantization.mixed import hold_members, member_of, plain_member, runs_of
from minillm.quantization.quantized import Quantized, stacked

logger = logging.getLogger(__name__)


class QuantizedMethod(LinearMethod):
    """A quantised matrix, made dense for each product. The base of faster methods.

    Its tensors are buffers of the layer. `dtype` is that of activations, `threshold` that of
    `Format`.
    """

    def __init__(self, dtype: torch.dtype, names: tuple[str, ...], threshold: float = 0.0):
        self.dtype, self.names, self.threshold = dtype, names, threshold

    def quantized(self, matrix: Matrix) -> Quantized:
        """The stored tensors; of a stack the rows of all copies."""
        return Quantized(**{name: matrix.get_buffer(name) for name in self.names})

    def values(self, matrix: Matrix) -> Tensor:
        """The dense matrix in `matrix.shape`, made for this call."""
        return self.quantized(matrix).dense(self.dtype).view(matrix.shape)

    def lookup(self, matrix: Matrix, ids: Tensor) -> Tensor:
        return self.quantized(matrix).rows(ids).dense(self.dtype)

    def experts(
        self, gate_up: Matrix, down: Matrix, x: Tensor, weights: Tensor, ids: Tensor, tiled: bool
    ) -> Tensor:
        """MoE layer as `LinearMethod.experts`; only the chosen experts are made dense."""
        chosen, places = torch.unique(ids, return_inverse=True)
        run = ops.tiled_moe_experts if tiled else ops.moe_experts
        parts = some_copies(gate_up, chosen), some_copies(down, chosen)
        return run(x, *parts, weights, places.to(ids.dtype))


def some_copies(matrix: Matrix, chosen: Tensor) -> Tensor:
    """The dense matrices of some copies of a stack, [len(chosen), out, in]."""
    method = matrix.method
    if not isinstance(method, QuantizedMethod):
        return matrix.values()[chosen]
    _, out, width = matrix.shape
    rows = (chosen[:, None] * out + torch.arange(out, device=chosen.device)).flatten()
    return method.quantized(matrix).rows(rows).dense(method.dtype).view(len(chosen), out, width)


def install(matrix: Matrix, weights: Quantized, dtype: torch.dtype, threshold: float = 0.0) -> None:
    """Store a quantised matrix in a layer."""
    matrix.weight = None  # type: ignore[assignment]
    for name, tensor in weights.parts().items():
        matrix.register_buffer(name, tensor)
    matrix.method = QuantizedMethod(dtype, tuple(weights.parts()), threshold)


def to_dense(matrix: Matrix) -> bool:
    """Make a quantised matrix that no kernel reads dense, once, in place of for each product.
    Returns False for all others."""
    method = matrix.method
    if type(method) is not QuantizedMethod:
        return False
    values = method.values(matrix)
    for name in method.names:
        delattr(matrix, name)
    matrix.method = PlainLinearMethod()
    matrix.weight = frozen(values)
    return True


class LoadingMethod(LinearMethod):
    """A matrix that is being read from a quantised checkpoint.

    It holds the tensors of the file as they are. `finish` turns them into a `Quantized`, into
    members of several formats, or into a dense weight, and replaces this method. It is dense if no
    part has a resident form, if experts of a stack have different formats, or if `dense` asks for
    it.
    """

    def __init__(self, format: Format, dense: bool = False):
        self.format, self.dense = format, dense
        self.found: dict[tuple[WeightSlice, str], Tensor] = {}
        self.dtype = torch.float32
        self.device: torch.device | str = "cpu"

    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device | str) -> None:
        self.dtype, self.device = dtype, device
        for part in matrix.parts:
            for suffix, stored in self.format.tensors(part).items():
                shape = stored.slice.held
                memory = torch.empty(shape, dtype=stored.dtype or dtype, device=device)
                self.found[part, suffix] = memory

    def checkpoint_tensors(
        self, matrix: Matrix, part: WeightSlice, start: int
    ) -> Iterator[CheckpointTensor]:
        for suffix, stored in self.format.tensors(part).items():
            target = self.found[part, suffix]
            yield CheckpointTensor(f"{part.name}.{suffix}", target, stored.slice, load_same)

    def after_loading(self, matrix: Matrix) -> None:
        """Decode all parts; afterwards the layer computes."""
        decoded = [self._decode(part) for part in matrix.parts]
        quantized = [part for part in decoded if isinstance(part, Quantized)]
        whole = stacked(quantized) if len(quantized) == len(decoded) else None
        if whole is not None and not self.dense and whole.codes.numel():
            install(matrix, whole, self.dtype, self.format.threshold)
            return
        if quantized and not self.dense and is_divisible(matrix):
            self._mix(matrix, decoded)
            return
        if not all(map(self.format.is_plain, matrix.parts)) and not self.dense:
            names = ", ".join(part.name for part in matrix.parts)
            why = "its experts have different formats" if quantized else "its groups are cut"
            logger.info("%s: dense in memory, because %s.", names, why)
        dense = [
            part.dense(self.dtype) if isinstance(part, Quantized) else part for part in decoded
        ]
        matrix.method = PlainLinearMethod()
        matrix.weight = frozen(torch.cat(dense).to(self.dtype).view(matrix.shape))

    def _mix(self, matrix: Matrix, decoded: Sequence[Quantized | Tensor]) -> None:
        """Hold each run of parts with one format in a member of its own."""
        made, start = list[Matrix](), 0
        for count, found in runs_of(decoded):
            parts = matrix.parts[start : start + count]
            if isinstance(found, Quantized):
                made.append(member_of(parts))
                install(made[-1], found, self.dtype, self.format.threshold)
            else:
                made.append(plain_member(parts, found.to(self.dtype)))
            start += count
        hold_members(matrix, made)

    def _decode(self, part: WeightSlice) -> Quantized | Tensor:
        suffixes = self.format.tensors(part)
        return self.format.decode(part, {each: self.found.pop((part, each)) for each in suffixes})

    def num_bytes(self, matrix: Matrix) -> int:
        return sum(tensor.nbytes for tensor in self.found.values())


def is_divisible(matrix: Matrix) -> bool:
    """Whether the parts of a matrix may be held in several formats: not in a stack, and not if this
    rank has no rows of one."""
    return len(matrix.parts) > 1 and matrix.copies is None and all(p.rows for p in matrix.parts)


def load_same(place: CheckpointTensor, stored: Tensor) -> None:
    """Copy a tensor of the same shape and kind of number."""
    if stored.shape != place.target.shape:  # `copy_` would broadcast
        raise CheckpointError(
            f"{place.name} has shape {list(stored.shape)}; {list(place.target.shape)} is expected."
        )
    both_float = stored.is_floating_point() and place.target.is_floating_point()
    small = {stored.dtype, place.target.dtype} & {torch.float8_e4m3fn}
    if stored.dtype != place.target.dtype and (small or not both_float):
        kinds = (str(tensor.dtype).removeprefix("torch.") for tensor in (stored, place.target))
        raise CheckpointError("{} is stored as {}; {} is expected.".format(place.name, *kinds))
    place.target.copy_(stored)
