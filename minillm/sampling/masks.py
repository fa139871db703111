"""Edits that exclude tokens: allowed_token_ids and structured_outputs.

A mask has one bit per token. Where C samples and a mask is a row's only edit, C reads the mask.
Elsewhere it is added to a copy of the logits: 0 for a token that is allowed, else -inf.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from minillm.errors import UnsupportedFeatureError
from minillm.ops.transfers import indices, upload
from minillm.sampling.edit import ALWAYS, Context, Copies, Edit, Ints
from minillm.scheduling.plan import NewSequence
from minillm.structured.grammars import Constraint


class Masks(Edit):
    """Excludes the tokens that the `mask` of a row does not allow."""

    def __init__(self, context: Context):
        super().__init__(context)
        bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
        # float32 [256, 8]: byte of a mask -> values to add
        self._numbers = torch.where(bits > 0, 0.0, -math.inf).to(context.device)
        self._space = torch.empty(0, 8, device=context.device)  # for values of masks

    def apply(self, copies: Copies) -> None:
        at = zip(copies.rows, copies.positions, strict=True)
        of = {i: self.mask(*place) for i, place in enumerate(at) if place[0] in self.rows}
        codes = torch.cat(list(of.values())).int()
        if len(self._space) < len(codes):  # kept: fresh pages would take longer than the rest
            self._space = torch.empty(len(codes), 8, device=self.context.device)
        numbers = torch.index_select(self._numbers, 0, codes, out=self._space[: len(codes)])
        numbers, first = numbers.view(len(of), -1)[:, : self.context.vocab_size], next(iter(of))
        if list(of) == list(range(first, first + len(of))):  # adjacent: six times as fast
            copies.logits[first : first + len(of)].add_(numbers)
        else:
            copies.logits.index_add_(0, indices(self.context.device, list(of)), numbers)

    @abstractmethod
    def mask(self, row: int, position: int) -> Tensor: ...


class AllowedTokens(Masks):
    """allowed_token_ids: the same mask at every position, which `rows` holds."""

    def set_row(self, row: int, new: NewSequence, known: Ints) -> tuple[Tensor, int] | None:
        ids = new.params.allowed_token_ids
        if ids is None:
            return None
        bits = np.zeros(self.context.vocab_size, dtype=bool)
        bits[list(ids)] = True
        return upload(self.context.device, np.packbits(bits, bitorder="little"))[0], ALWAYS

    def mask(self, row: int, position: int) -> Tensor:
        return self.rows[row]

    def follows(self, row: int) -> bool:
        return False


class StructuredOutputs(Masks):
    """structured_outputs: a mask for each position of a step, written by the host with the
    `Constraint` in `rows`."""

    def set_row(self, row: int, new: NewSequence, known: Ints) -> tuple[Constraint, int] | None:
        if new.params.structured_outputs is None:
            return None
        if self.context.grammars is None:
            raise UnsupportedFeatureError("structured_outputs needs an engine.")
        parts = new.params, known, new.num_prompt_tokens, new.stop_ids
        return Constraint(self.context.grammars, *parts), ALWAYS

    def begin(self, rows: Ints, positions: Ints, drafts: Mapping[int, Ints]) -> None:
        constrained = [i for i, row in enumerate(rows) if row in self.rows]
        table = np.empty((len(constrained), -(-self.context.vocab_size // 8)), dtype=np.uint8)
        places, start = {}, 0
        for row, group in groupby(constrained, key=rows.__getitem__):
            first, *others = group
            end, drafted = start + 1 + len(others), drafts.get(row, ())
            self.rows[row].masks(positions[first], drafted, table[start:end])
            places[row], start = start - positions[first], end
        (self._table,) = upload(self.context.device, table)
        self._places = places  # row -> its place in the table, minus its position

    def mask(self, row: int, position: int) -> Tensor:
        return self._table[self._places[row] + position]

    def drafts(self, row: int, proposed: list[int], most: int, forces: bool) -> list[int]:
        return self.rows[row].drafts(proposed, most, forces)
