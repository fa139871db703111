"""bad_words, min_tokens and logit_bias: values added to the logits of single tokens."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minillm.ops.transfers import indices, upload
from minillm.sampling.edit import ALWAYS, Context, Copies, Edit, Ints
from minillm.sampling.segments import Segments
from minillm.scheduling.plan import NewSequence

# Ring buffer of last tokens for rows with bad words; a power of 2. A word has up to 256 characters
# of up to 4 tokens; rejected drafts overwrite the oldest entries.
RECENT = 2048


class Entry(NamedTuple):
    """Add `value` to the logit of `token` at positions `since` to `until` (exclusive), if the
    preceding tokens are `before`."""

    token: int
    value: float
    since: int = 0
    until: int = ALWAYS
    before: tuple[int, ...] = ()


def entries_of(new: NewSequence) -> Iterator[Entry]:
    """The bans and biases of a sequence. Bad words are matched in the output only, as in vLLM."""
    for word in filter(None, new.bad_words_ids):
        yield Entry(word[-1], -math.inf, new.num_prompt_tokens + len(word) - 1, before=word[:-1])
    until = new.num_prompt_tokens + new.params.min_tokens
    if len(new.token_ids) < until:
        yield from (Entry(token, -math.inf, until=until) for token in new.stop_ids)
    for token, bias in (new.params.logit_bias or {}).items():
        yield Entry(token, bias)


class TokenValues(Edit):
    """The entries of all rows. `rows` says whether a row has bad words of several tokens."""

    def __init__(self, context: Context):
        super().__init__(context)
        self._entries = Segments(context.device)
        # int64 [rows, RECENT], allocated at the first use: position p at p % RECENT
        self._recent = torch.zeros(0, RECENT, dtype=torch.int64, device=context.device)

    def set_row(self, row: int, new: NewSequence, known: Ints) -> tuple[bool, int] | None:
        entries = list(entries_of(new))
        if not entries:
            return None
        token, value, since, until, words = zip(*entries, strict=True)
        longest = max(map(len, words))
        before = [(-1,) * (longest - len(word)) + word for word in words]
        columns = {"token": token, "since": since, "until": until}
        self._entries.put(
            row,
            before=np.array(before, dtype=np.int64).reshape(len(entries), longest),
            value=np.array(value, dtype=np.float32),
            **{name: np.array(column) for name, column in columns.items()},
        )
        if longest:
            if not len(self._recent):
                self._recent = self._recent.new_zeros(self.context.num_rows, RECENT)
            end = len(new.token_ids)
            places = np.arange(max(new.num_prompt_tokens, end - RECENT), end)
            last = np.array(new.token_ids, dtype=np.int64)[places]
            place, recent = upload(self.context.device, places % RECENT, last)
            self._recent[row, place] = recent
        return longest > 0, max(until)

    def drop(self, row: int) -> None:
        self._entries.drop(row)

    def move(self, source: int, target: int) -> None:
        self._entries.move(source, target)
        if len(self._recent):
            self._recent[target] = self._recent[source]

    def apply(self, copies: Copies) -> None:
        entries = self._entries
        owner, token, before = entries.owner, entries["token"], entries["before"]
        at = copies.index[owner]  # [E], -1 for rows not in this step
        position = indices(self.context.device, copies.positions)[at]
        holds = (at >= 0) & (position >= entries["since"]) & (position < entries["until"])
        if before.shape[1]:
            offsets = torch.arange(-before.shape[1], 0, device=self.context.device)
            recent = self._recent[owner[:, None], (position[:, None] + offsets) % RECENT]
            holds &= ((before == recent) | (before < 0)).all(dim=1)
        value = entries["value"].masked_fill(~holds, 0.0)
        copies.wide.view(-1).index_add_(0, copies.flat(at, token), value)

    def append(self, rows: Ints, positions: Ints, tokens: Tensor) -> None:
        if any(self.rows.values()):
            where, at = indices(self.context.device, [list(rows), list(positions)])
            self._recent[where, at % RECENT] = tokens

    def follows(self, row: int) -> bool:
        return self.rows[row]
