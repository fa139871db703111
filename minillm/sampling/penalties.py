"""Penalties: the distinct tokens of each sequence and their counts, kept on the device.

The repetition penalty (Keskar et al., 2019) counts prompt and output; the frequency and presence
penalties count the output.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from minillm.ops.transfers import indices, upload
from minillm.sampling.edit import ALWAYS, Context, Copies, Edit, Ints
from minillm.sampling.segments import Segments
from minillm.scheduling.plan import NewSequence

ROOM = 64  # initial capacity for new tokens of a row
NAMES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


class Penalties(Edit):
    """The penalties of all rows. `rows` has the number of free places in a row's segment."""

    def __init__(self, context: Context):
        super().__init__(context)
        self._seen = Segments(context.device)
        self._numbers = torch.ones(3, context.num_rows, device=context.device)

    def set_row(self, row: int, new: NewSequence, known: Ints) -> tuple[int, int] | None:
        numbers = [getattr(new.params, name) for name in NAMES]
        if numbers == [1, 0, 0]:
            return None
        first = new.num_prompt_tokens
        prompt = new.token_ids[:first] if new.params.repetition_penalty != 1 else ()
        counts = Counter(dict.fromkeys(prompt, 0))
        counts.update(new.token_ids[first:])
        room = max(ROOM, len(counts))
        ids = np.array([*counts, *[self.context.vocab_size] * room])  # a column that is dropped
        times = np.array([*counts.values(), *[0] * room], dtype=np.float32)
        self._seen.put(row, token=ids, count=times)
        self._numbers[:, row] = upload(self.context.device, np.array(numbers, np.float32))[0]
        return room, ALWAYS

    def drop(self, row: int) -> None:
        self._seen.drop(row)

    def move(self, source: int, target: int) -> None:
        self._seen.move(source, target)
        self._numbers[:, target] = self._numbers[:, source]

    def apply(self, copies: Copies) -> None:
        span = self._seen.span(copies.rows)
        columns = self._seen.owner, self._seen["token"], self._seen["count"]
        owner, token, count = (column[span] for column in columns)
        at = copies.index.index_select(0, owner)  # much faster on a CPU than index[owner]
        repetition, frequency, presence = self._numbers.index_select(1, owner)
        where, values = copies.flat(at, token), copies.wide.view(-1)
        value = values.index_select(0, where)
        value = torch.where(value > 0, value / repetition, value * repetition)
        values.scatter_(0, where, value - frequency * count - presence * (count > 0))

    def snapshot(self) -> Callable[[], None]:
        seen, room = self._seen, dict(self.rows)
        self._seen = seen.copy()

        def restore() -> None:
            self._seen, self.rows = seen, room

        return restore

    def append(self, rows: Ints, positions: Ints, tokens: Tensor) -> None:
        """Count one token in each row. A known token's count is increased; a new one goes to the
        next free place of the row's segment. The place is used up either way (padding for a known
        token), so the host tracks free places without reading the device."""
        members = [i for i, row in enumerate(rows) if row in self.rows]
        if not members:
            return
        rows, tokens = [rows[i] for i in members], tokens[indices(self.context.device, members)]
        for row in rows:
            if self.rows[row] == 0:
                self._widen(row)
            self.rows[row] -= 1
        seen, of = self._seen, indices(self.context.device, rows)
        chosen = torch.full((self.context.num_rows,), -1, device=self.context.device)
        chosen[of] = tokens
        match = seen["token"] == chosen[seen.owner]  # [T]
        seen["count"].add_(match)
        known = torch.zeros_like(chosen)
        known = known.index_add_(0, seen.owner, match.long())[of] > 0
        ends = [seen.start(row) + seen.size(row) - self.rows[row] for row in rows]
        free = indices(self.context.device, ends) - 1
        seen["token"][free] = torch.where(known, self.context.vocab_size, tokens)
        seen["count"][free] = torch.where(known, 0.0, 1.0)

    def _widen(self, row: int) -> None:
        """Double the segment of a row."""
        token, count = self._seen.of(row, "token"), self._seen.of(row, "count")
        more = torch.full_like(token, self.context.vocab_size)
        self._seen.put(row, token=torch.cat((token, more)), count=torch.cat((count, 0 * count)))
        self.rows[row] = len(more)
