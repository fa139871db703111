"""An edit of logits: the interface, and what an edit is given."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm.ops.transfers import indices
from minillm.scheduling.plan import NewSequence
from minillm.structured.grammars import Grammars

ALWAYS = 2**62  # larger than any position
Ints = Sequence[int]


@dataclass(eq=False)
class Context:
    """What all edits share. `grammars` compiles structured_outputs."""

    num_rows: int
    vocab_size: int
    device: torch.device
    grammars: Grammars | None = None


class Copies:
    """Copies of the logits [P, V] of P distinct rows of the batch, to be changed in place.

    Attributes:
        wide: float32 [P, columns], more than V: the others take values without a token.
        logits: float32 [P, V], a view of `wide`.
    """

    def __init__(self, logits: Tensor, rows: Ints, positions: Ints, context: Context):
        self.rows, self.positions, self._context = rows, positions, context
        # Kernels read rows fastest from multiples of 16, and compile once for all of them.
        columns = (context.vocab_size // 16 + 1) * 16
        self.wide = logits.new_empty(len(rows), columns, dtype=torch.float32)
        self.wide[:, context.vocab_size :] = 0.0
        self.logits = self.wide[:, : context.vocab_size].copy_(logits)

    @cached_property
    def index(self) -> Tensor:
        """int64 [rows of the batch]: which of the P logits are a row's; -1 for none."""
        place = np.full(self._context.num_rows, -1, dtype=np.int64)
        place[list(self.rows)] = np.arange(len(self.rows))
        return indices(self._context.device, place)

    def flat(self, at: Tensor, token: Tensor) -> Tensor:
        """Flat indices into `wide` of tokens [T] of the logits `at` [T]; the last one for -1."""
        width = self.wide.shape[1]
        return at.clamp(min=0) * width + token.masked_fill(at < 0, width - 1)


class Edit(ABC):
    """One kind of edit, with the data of all rows that have it: on the host in `rows`, from which
    `Edits` moves and drops it, and on the device. A new kind is added to `EDITS` of `edits.py`."""

    def __init__(self, context: Context):
        self.context = context
        self.rows: dict[int, Any] = {}

    @abstractmethod
    def set_row(self, row: int, new: NewSequence, known: Ints) -> tuple[Any, int] | None:
        """What `rows` holds for a sequence, and the position where its edits end (`ALWAYS` if they
        do not); None if it has none. Stores what is on the device. `known` as of `Sampler`."""

    @abstractmethod
    def apply(self, copies: Copies) -> None:
        """Edit the copies; some of them are of `rows`."""

    def move(self, source: int, target: int) -> None:  # noqa: B027
        """Move what is on the device to a row that does not have this edit."""

    def drop(self, row: int) -> None:  # noqa: B027
        """Free what is on the device."""

    def begin(self, rows: Ints, positions: Ints, drafts: Mapping[int, Ints]) -> None:  # noqa: B027
        """A step begins; the arguments are those of `Sampler.choose`."""

    def mask(self, row: int, position: int) -> Tensor | None:
        """The tokens that may be chosen, uint8 [ceil(V / 8)], if this edit does nothing else: the C
        sampler reads them in place of a copy of the logits."""
        return None

    def append(self, rows: Ints, positions: Ints, tokens: Tensor) -> None:  # noqa: B027
        """As `Edits.append`; some of the rows have this edit."""

    def follows(self, row: int) -> bool:
        """Whether the edit of a row depends on the tokens that are appended."""
        return True

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that undoes every later `append`."""
        return lambda: None

    def drafts(self, row: int, proposed: list[int], most: int, forces: bool) -> list[int]:
        """Drafts for a row: at most `most`, of which some may be forced, in place of `proposed`."""
        return proposed
