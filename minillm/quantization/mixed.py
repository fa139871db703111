"""A matrix whose parts have formats of their own.

For example q and k in Q4_K and v in Q6_K, as in Q4_K_M, or q, k and v with different act orders.

Neighbouring parts of one format are one member, a matrix inside the matrix. Each member has its own
product, and the outputs lie side by side.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from minillm.layers.linear import Linear
from minillm.layers.linear_methods import LinearMethod, Matrix, WeightSlice, frozen
from minillm.quantization.quantized import Quantized, stacked


class MixedMethod(LinearMethod):
    """The products of the members of a matrix, one after the other."""

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        parts = members(matrix)
        sizes = [part.out_features for part in parts]
        biases = [None] * len(parts) if bias is None else bias.split(sizes)
        return torch.cat([
            part.method.apply(part, x, own) for part, own in zip(parts, biases, strict=True)
        ], dim=1)  # fmt: skip

    def values(self, matrix: Matrix) -> Tensor:
        return torch.cat([member.values() for member in members(matrix)])

    def num_bytes(self, matrix: Matrix) -> int:
        """Memory of all members, and of the matrix's bias."""
        return sum(member.num_bytes for member in members(matrix)) + super().num_bytes(matrix)


def members(matrix: Matrix) -> list[Matrix]:
    """The members of a mixed matrix in the order of their outputs; the matrix itself if it is not
    mixed."""
    if not isinstance(matrix.method, MixedMethod):
        return [matrix]
    children = matrix.get_submodule("members").children()
    return [member for member in children if isinstance(member, Matrix)]


def holders(model: nn.Module) -> Iterator[Matrix]:
    """All matrices that hold weights themselves; of a mixed one its members."""
    for matrix in model.modules():
        if isinstance(matrix, Matrix) and not isinstance(matrix.method, MixedMethod):
            yield matrix


def runs_of(decoded: Sequence[Quantized | Tensor]) -> list[tuple[int, Quantized | Tensor]]:
    """Neighbouring parts of one format joined: (number of parts, their rows) of each run."""
    runs: list[tuple[int, Quantized | Tensor]] = []
    for part in decoded:
        count, last = runs[-1] if runs else (0, None)
        joined: Quantized | Tensor | None = None
        if isinstance(part, Quantized) and isinstance(last, Quantized):
            joined = stacked((last, part))
        elif isinstance(part, Tensor) and isinstance(last, Tensor):
            joined = torch.cat((last, part))
        if joined is None:
            runs.append((1, part))
        else:
            runs[-1] = count + 1, joined
    return runs


def member_of(parts: Sequence[WeightSlice]) -> Linear:
    """A member without a bias, which the whole matrix has."""
    member = Linear("", 0, {})
    member.parts = tuple(parts)
    return member


def plain_member(parts: Sequence[WeightSlice], values: Tensor) -> Linear:
    """A member that is not quantised."""
    member = member_of(parts)
    member.weight = frozen(values)
    return member


def hold_members(matrix: Matrix, found: Sequence[Matrix]) -> None:
    """Make a matrix a mixed one with these members."""
    matrix.weight = None  # type: ignore[assignment]
    matrix.add_module("members", nn.ModuleList(found))
    matrix.method = MixedMethod()
