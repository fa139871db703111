"""Edits that exclude tokens: allowed_token_ids and structured_outputs.

A mask has one bit per token. Where C samples and a mask is a row's only edit, C reads the mask.
Elsewhere it is added to a copy of the logits: 0 for a token that is allowed, else -inf.
"""

import math
from collections.abc import Mapping
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from minillm.errors import UnsupportedFeatureError
from minillm.ops.transfers import indices, upload
from minillm.sampling.edit import ALWAYS, Context, Copies, Edit, Ints, SamplingRow
from minillm.structured.grammars import Constraint


class Masks(Edit):
    """Excludes the tokens that a row of `table`, uint8 [masks, bytes], does not allow."""

    def __init__(self, context: Context):
        super().__init__(context)
        width = -(-context.vocab_size // 8)
        self.table = torch.empty(0, width, dtype=torch.uint8, device=context.device)
        bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
        # float32 [256, 8]: byte of a mask -> values to add
        self._numbers = torch.where(bits > 0, 0.0, -math.inf).to(context.device)
        self._space = torch.empty(0, 8, device=context.device)  # for values of masks

    def place(self, row: int, position: int) -> int:
        """The row of `table` for a row of the batch."""
        return row

    def mask(self, row: int, position: int) -> Tensor | None:
        return self.table[self.place(row, position)]

    def apply(self, copies: Copies) -> None:
        members = [(i, row) for i, row in enumerate(copies.rows) if row in self.rows]
        of = {i: self.place(row, copies.positions[i]) for i, row in members}
        where, chosen = indices(self.context.device, [list(of), list(of.values())])
        codes = self.table.index_select(0, chosen).flatten().int()
        if len(self._space) < len(codes):  # kept: fresh pages would take longer than the rest
            self._space = torch.empty(len(codes), 8, device=self.context.device)
        numbers = torch.index_select(self._numbers, 0, codes, out=self._space[: len(codes)])
        numbers, first = numbers.view(len(of), -1)[:, : self.context.vocab_size], next(iter(of))
        if list(of) == list(range(first, first + len(of))):  # adjacent: six times as fast
            copies.logits[first : first + len(of)].add_(numbers)
        else:
            copies.logits.index_add_(0, where, numbers)


class AllowedTokens(Masks):
    """allowed_token_ids: a mask for each row of the batch, allocated at the first use."""

    def set_row(self, row: int, request: SamplingRow) -> int:
        ids = request.params.allowed_token_ids
        if ids is None:
            return 0
        if not len(self.table):
            self.table = self.table.new_zeros(self.context.num_rows, self.table.shape[1])
        bits = np.zeros(self.context.vocab_size, dtype=bool)
        bits[list(ids)] = True
        self.table[row] = upload(self.context.device, np.packbits(bits, bitorder="little"))[0]
        return ALWAYS

    def move(self, source: int, target: int) -> None:
        self.table[target] = self.table[source]

    def follows(self, row: int) -> bool:
        return False


class StructuredOutputs(Masks):
    """structured_outputs: a mask for each position of a step, written by the host."""

    def __init__(self, context: Context):
        super().__init__(context)
        self._constraints: dict[int, Constraint] = {}  # by row
        self._places: dict[int, int] = {}  # row -> its place in the table, minus its position

    def set_row(self, row: int, request: SamplingRow) -> int:
        if request.params.structured_outputs is None:
            return 0
        if self.context.grammars is None:
            raise UnsupportedFeatureError("structured_outputs needs an engine.")
        parts = request.params, request.token_ids, request.first, request.stop_ids
        self._constraints[row] = Constraint(self.context.grammars, *parts)
        return ALWAYS

    def drop(self, row: int) -> None:
        del self._constraints[row]

    def move(self, source: int, target: int) -> None:
        self._constraints[target] = self._constraints.pop(source)

    def begin(self, rows: Ints, positions: Ints, drafts: Mapping[int, Ints]) -> None:
        constrained = [i for i, row in enumerate(rows) if row in self.rows]
        table = np.empty((len(constrained), self.table.shape[1]), dtype=np.uint8)
        self._places, start = {}, 0
        for row, group in groupby(constrained, key=rows.__getitem__):
            first, *others = group
            end, drafted = start + 1 + len(others), drafts.get(row, ())
            self._constraints[row].masks(positions[first], drafted, table[start:end])
            self._places[row], start = start - positions[first], end
        (self.table,) = upload(self.context.device, table)

    def place(self, row: int, position: int) -> int:
        return self._places[row] + position

    def drafts(self, row: int, proposed: list[int], most: int, forces: bool) -> list[int]:
        return self._constraints[row].drafts(proposed, most, forces)
