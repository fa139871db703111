"""Matrices that a checkpoint stores as one, such as Phi-3's `qkv_proj` of q, k and v."""

from collections.abc import Mapping
from dataclasses import replace

from minillm.layers.linear_methods import Matrix, MergedMatrices, WeightSlice


def merge(matrix: Matrix, merged: MergedMatrices) -> None:
    """Read the parts of a matrix from the merged matrices of the checkpoint. Parts whose rows are
    neighbours become one: all of them, but on a rank that holds some rows of each."""
    if not merged:
        return
    heights = {part.name: part.shape[0] for part in matrix.parts}
    parts: list[WeightSlice] = []
    for part in (within(part, merged, heights) for part in matrix.parts):
        last = parts[-1] if parts else None
        if last and last.name == part.name and last.rows.stop == part.rows.start:
            parts[-1] = replace(last, rows=range(last.rows.start, part.rows.stop))
        else:
            parts.append(part)
    matrix.parts = tuple(parts)


def within(part: WeightSlice, merged: MergedMatrices, heights: Mapping[str, int]) -> WeightSlice:
    """The same rows, of the merged matrix that has them, if there is one. `heights` has the rows of
    each matrix of the layer."""
    prefix, dot, own = part.name.rpartition(".")
    for name, members in merged:
        sizes = [heights.get(prefix + dot + member, 0) for member in members]
        if own in members and all(sizes):
            first = sum(sizes[: members.index(own)])
            rows = range(first + part.rows.start, first + part.rows.stop)
            return WeightSlice(prefix + dot + name, (sum(sizes), part.shape[1]), rows, part.columns)
    return part
