"""Logits processors ("edits"), stored on the device for each row of the persistent batch.

    allowed_token_ids   one bit per token; other tokens get -inf              `masks.py`
    structured_outputs  the same, written by the host for each position       `masks.py`
    bad_words, min_tokens, logit_bias   (token, value to add, since, until,
                        tokens that must precede it)                          `token_values.py`
    penalties           the distinct tokens of the sequence and their counts  `penalties.py`

A row's data is written when a sequence is assigned to the row; `append` then adds each sampled
token on the device. Edits therefore need no token on the host, and a step with edits can be
launched before the previous one is collected.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from minillm.ops import cpu_sampling
from minillm.sampling.edit import Context, Copies, Edit, Ints
from minillm.sampling.masks import AllowedTokens, StructuredOutputs
from minillm.sampling.penalties import Penalties
from minillm.sampling.token_values import TokenValues
from minillm.scheduling.plan import NewSequence

# In the order in which they are applied, which is vLLM's.
EDITS: tuple[type[Edit], ...] = (StructuredOutputs, AllowedTokens, TokenValues, Penalties)
CHUNK_VALUES_CPU = 2**21  # logits edited at a time: temporaries below 100 MB
CHUNK_VALUES_GPU = 2**23  # temporaries below 1 GB


class Edits(Context):
    """The logits processors of all rows of the persistent batch, on one device."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        super().__init__(num_rows, vocab_size, device)
        self.edits = tuple(kind(self) for kind in EDITS)
        self._of: dict[int, list[Edit]] = {}  # by row
        self._until: dict[int, int] = {}  # row with edits -> position where they end

    def set_row(self, row: int, new: NewSequence, known: Ints) -> None:
        """Assign a row to a sequence, as `Sampler.set_row`."""
        self.drop(row)
        for edit in self.edits:
            if asked := edit.set_row(row, new, known):
                edit.rows[row], until = asked
                self._of.setdefault(row, []).append(edit)
                self._until[row] = max(until, self._until.get(row, 0))

    def drop(self, row: int) -> None:
        """Free a row."""
        self._until.pop(row, None)
        for edit in self._of.pop(row, ()):
            edit.drop(row)
            del edit.rows[row]

    def move(self, source: int, target: int) -> None:
        """Move a sequence to another row."""
        self.drop(target)
        if source in self._of:
            self._of[target] = self._of.pop(source)
            self._until[target] = self._until.pop(source)
            for edit in self._of[target]:
                edit.move(source, target)
                edit.rows[target] = edit.rows.pop(source)

    def rows_of(self, rows: Ints, positions: Ints) -> list[int]:
        """Indices into `rows` of those with edits at their position."""
        if not self._until:
            return []
        return [i for i, row in enumerate(rows) if positions[i] < self._until.get(row, -1)]

    def masks(
        self, rows: Ints, positions: Ints, drafts: Mapping[int, Ints], logits: Tensor | None
    ) -> tuple[list[Tensor | None], list[int]]:
        """Begin a step. Returns the mask of each of the logits, uint8 [bytes] or None, if C samples
        these `logits` and a mask is the only edit of some rows; and the indices of those with other
        edits, which are copied."""
        members = self.rows_of(rows, positions)
        for edit in self.edits if members else ():
            if edit.rows:
                edit.begin(rows, positions, drafts)
        masks: list[Tensor | None] = [None] * len(rows)
        may = any(edit.rows and type(edit).mask is not Edit.mask for edit in self.edits)
        for i in members if may and logits is not None and cpu_sampling.takes(logits) else ():
            edit, *others = self._of[rows[i]]
            masks[i] = None if others else edit.mask(rows[i], positions[i])
        copied = [i for i in members if masks[i] is None]
        return ([] if len(copied) == len(members) else masks), copied

    def chunks(self, members: list[int]) -> Iterator[list[int]]:
        """Split `members` into chunks that bound the memory of temporaries."""
        values = CHUNK_VALUES_CPU if self.device.type == "cpu" else CHUNK_VALUES_GPU
        size = max(1, values // self.vocab_size)
        return (members[start : start + size] for start in range(0, len(members), size))

    def apply(self, logits: Tensor, rows: Ints, positions: Ints) -> Tensor:
        """Edited copies of logits [P, V] of P distinct rows: float32 [P, V]."""
        copies = Copies(logits, rows, positions, self)
        for edit in self.edits:
            if not edit.rows.keys().isdisjoint(rows):
                edit.apply(copies)
        return copies.logits

    def append(self, rows: Ints, positions: Ints, tokens: Tensor) -> None:
        """Append tokens, int64 [R], at `positions` to the sequences in these distinct rows."""
        for edit in self.edits:
            if edit.rows:
                edit.append(rows, positions, tokens)

    def follows(self, row: int) -> bool:
        """Whether the edits of a row depend on its tokens."""
        return any(edit.follows(row) for edit in self._of.get(row, ()))

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that undoes every later `append`."""
        undo = [edit.snapshot() for edit in self.edits if edit.rows]

        def restore() -> None:
            for put_back in undo:
                put_back()

        return restore

    def drafts(self, row: int, proposed: list[int], most: int, forces: bool) -> list[int]:
        """Drafts for a row: those `proposed`, unless an edit excludes some or, with `forces`,
        proposes others."""
        for edit in self._of.get(row, ()):
            proposed = edit.drafts(row, proposed, most, forces)
        return proposed
