"""Logits processors ("edits"), stored on the device for each row of the persistent batch.

    allowed_token_ids   one bit per token; other tokens get -inf                   `masks`
    structured_outputs  the same, written by the host for each position of a step `filled`
    bad_words, min_tokens, logit_bias   (token, value to add, since, until,
                        tokens that must precede it)                             `entries`
    penalties           the distinct tokens of the sequence and their counts       `seen`

A row's data is written when a sequence is assigned to the row; `append` then adds each sampled
token on the device. Edits therefore need no token on the host, and a step with edits can be
launched before the previous one is collected.

The order is vLLM's: masks, bans, biases, penalties. The repetition penalty (Keskar et al., 2019)
counts prompt and output; the frequency and presence penalties count the output.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from minillm.api.sampling_params import SamplingParams
from minillm.errors import UnsupportedFeatureError
from minillm.ops.cpu_sampling import takes as takes_masks
from minillm.ops.transfers import indices, upload
from minillm.sampling.segments import Segments
from minillm.structured.grammars import Constraint, Grammars

CHUNK_VALUES_CPU = 2**21  # logits edited at a time: temporaries below 100 MB
CHUNK_VALUES_GPU = 2**23  # temporaries below 1 GB
# Ring buffer of last tokens for rows with bad words; a power of 2. A word has up to 256 characters
# of up to 4 tokens; rejected drafts overwrite the oldest entries.
RECENT = 2048
ROOM = 64  # initial capacity for new tokens of a row with penalties
ALWAYS = 2**62  # larger than any position
Ints = Sequence[int]
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(slots=True)
class SamplingRow:
    """What the sampler needs to know about a sequence.

    Token ids must be below the vocabulary size; `validate_against_model` checks that, not this.

    Attributes:
        seed: the request's seed, any 64-bit value; the same for all its completions.
        sample_index: which of the request's `n` completions this is.
        position: position of the next token in the sequence (prompt length for the first).
        stop_ids: end-of-sequence and stop token ids, banned until `params.min_tokens`.
        bad_words_ids: `params.bad_words`, tokenized.
        token_ids: all tokens that the host knows, a list that grows with the sequence; only for
            `params.structured_outputs`.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    position: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    stop_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    token_ids: Sequence[int] = ()

    @property
    def first(self) -> int:
        """Position of the first output token."""
        return self.position - len(self.output_token_ids)


def is_penalised(params: SamplingParams) -> bool:
    """Whether any penalty is on."""
    return tuple(getattr(params, name) for name in PENALTIES) != (1.0, 0.0, 0.0)


class Edits:
    """The logits processors of all rows of the persistent batch, on one device."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device):
        self.num_rows, self.vocab_size, self.device = num_rows, vocab_size, device
        self._until: dict[int, int] = {}  # row with edits -> position where they end
        self._masked: set[int] = set()
        self._masks: Tensor | None = None  # uint8 [rows, bytes], allocated at first use
        each = torch.arange(256)[:, None] >> torch.arange(8) & 1
        # float32 [256, 8]: mask byte -> values to add
        self._numbers = torch.where(each > 0, 0.0, -math.inf).to(device)
        self._space = torch.empty(0, 8, device=device)  # for values of masks
        self.grammars: Grammars | None = None  # for structured_outputs
        self._constraints: dict[int, Constraint] = {}  # by row
        self._filled: Tensor | None = None  # uint8 [positions of this step, bytes]
        self._places: dict[int, int] = {}  # row -> its place in `_filled`, minus its position
        self._entries = Segments(num_rows, device)
        self._with_words: set[int] = set()
        self._recent: Tensor | None = None  # int64 [rows, RECENT]: position p at p % RECENT
        self._seen = Segments(num_rows, device)
        self._room: dict[int, int] = {}  # row with penalties -> free places in its segment
        self._penalties = torch.ones(3, num_rows, device=device)

    @property
    def num_bytes(self) -> int:
        """Memory of the persistent state."""
        kept = sum(t.nbytes for t in (self._penalties, self._masks, self._recent) if t is not None)
        return kept + self._entries.num_bytes + self._seen.num_bytes

    # ---- assigning rows --------------------------------------------------------------------

    def set_row(self, row: int, request: SamplingRow) -> None:
        """Assign a row to a sequence."""
        self.drop(row)
        params = request.params
        if params.allowed_token_ids is not None:
            self._set_mask(row, params.allowed_token_ids)
        entries = list(entries_of(request))
        if entries:
            self._set_entries(row, entries, request)
        if is_penalised(params):
            self._set_seen(row, request)
        if params.structured_outputs is not None:
            self._set_constraint(row, request)
        if row in self._masked or row in self._seen or row in self._constraints:
            self._until[row] = ALWAYS
        elif entries:
            self._until[row] = max(entry.until for entry in entries)

    def drop(self, row: int) -> None:
        """Free a row."""
        if self._until.pop(row, None) is None:
            return
        self._masked.discard(row)
        self._with_words.discard(row)
        self._room.pop(row, None)
        self._constraints.pop(row, None)
        self._entries.drop(row)
        self._seen.drop(row)

    def move(self, source: int, target: int) -> None:
        """Move a sequence to another row."""
        self.drop(target)
        if source not in self._until:
            return
        self._until[target] = self._until.pop(source)
        for marked in (self._masked, self._with_words):
            if source in marked:
                marked.remove(source)
                marked.add(target)
        for table in (self._masks, self._recent, self._penalties.T):
            if table is not None:
                table[target] = table[source]
        for table_of in (self._room, self._constraints):
            if source in table_of:
                table_of[target] = table_of.pop(source)  # type: ignore[assignment]
        self._entries.move(source, target)
        self._seen.move(source, target)

    def rows_of(self, rows: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Indices into `rows` of those with edits at their position."""
        if not self._until:
            return []
        return [i for i, row in enumerate(rows) if positions[i] < self._until.get(row, -1)]

    def _set_mask(self, row: int, ids: Sequence[int]) -> None:
        if self._masks is None:
            shape = self.num_rows, -(-self.vocab_size // 8)
            self._masks = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        bits = np.zeros(self.vocab_size, dtype=bool)
        bits[list(ids)] = True
        self._masks[row] = upload(self.device, np.packbits(bits, bitorder="little"))[0]
        self._masked.add(row)

    def _set_constraint(self, row: int, request: SamplingRow) -> None:
        if self.grammars is None:
            raise UnsupportedFeatureError("structured_outputs needs an engine.")
        parts = request.params, request.token_ids, request.first, request.stop_ids
        self._constraints[row] = Constraint(self.grammars, *parts)

    def _set_entries(self, row: int, entries: list["Entry"], request: SamplingRow) -> None:
        longest = max(len(entry.before) for entry in entries)
        before = [(-1,) * (longest - len(each.before)) + each.before for each in entries]
        self._entries.put(
            row,
            token=torch.tensor([each.token for each in entries]),
            value=torch.tensor([each.value for each in entries]),
            since=torch.tensor([each.since for each in entries]),
            until=torch.tensor([each.until for each in entries]),
            before=torch.tensor(before, dtype=torch.int64).view(len(entries), longest),
        )
        if longest:
            self._with_words.add(row)
            if self._recent is None:
                shape = self.num_rows, RECENT
                self._recent = torch.zeros(shape, dtype=torch.int64, device=self.device)
            last = torch.tensor(list(request.output_token_ids)[-RECENT:], dtype=torch.int64)
            places = torch.arange(request.position - len(last), request.position) % RECENT
            place, token = upload(self.device, places.numpy(), last.numpy())
            self._recent[row, place] = token

    def _set_seen(self, row: int, request: SamplingRow) -> None:
        prompt = request.prompt_token_ids if request.params.repetition_penalty != 1 else ()
        counts = dict.fromkeys(prompt, 0.0)
        for token in request.output_token_ids:
            counts[token] = counts.get(token, 0.0) + 1
        room = max(ROOM, len(counts))
        ids = torch.full((len(counts) + room,), self.vocab_size)  # a padding column, discarded
        ids[: len(counts)] = torch.tensor(list(counts), dtype=torch.int64)
        times = torch.zeros(len(ids))
        times[: len(counts)] = torch.tensor(list(counts.values()))
        self._seen.put(row, token=ids, count=times)
        self._room[row] = room
        numbers = [getattr(request.params, name) for name in PENALTIES]
        self._penalties[:, row] = upload(self.device, np.array(numbers, dtype=np.float32))[0]

    # ---- editing ---------------------------------------------------------------------------

    def masks(
        self, members: Ints, rows: Ints, positions: Ints, drafts: Mapping[int, Ints], logits: Tensor
    ) -> list[Tensor | None] | None:
        """Fill this step's masks. Returns the mask of each of the logits, uint8 [bytes] or None, if
        C samples and `members` have no other edits."""
        masks: list[Tensor | None] = [None] * len(rows)
        if self._constraints:
            constrained = [i for i, row in enumerate(rows) if row in self._constraints]
            table = np.empty((len(constrained), -(-self.vocab_size // 8)), dtype=np.uint8)
            self._places, start = {}, 0
            for row, group in groupby(constrained, key=rows.__getitem__):
                first, *others = group
                end, drafted = start + 1 + len(others), drafts.get(row, ())
                self._constraints[row].masks(positions[first], drafted, table[start:end])
                self._places[row], start = start - positions[first], end
            (self._filled,) = upload(self.device, table)
        for i in members:
            row, filled = rows[i], rows[i] in self._constraints
            kept = self._filled if filled else self._masks
            both = filled and row in self._masked
            if both or kept is None or row in self._entries or row in self._seen:
                return None
            masks[i] = kept[self._places[row] + positions[i] if filled else row]
        return masks if members and takes_masks(logits) else None

    def chunks(self, members: list[int]) -> Iterator[list[int]]:
        """Split `members` into chunks that bound the memory of temporaries."""
        values = CHUNK_VALUES_CPU if self.device.type == "cpu" else CHUNK_VALUES_GPU
        size = max(1, values // self.vocab_size)
        return (members[start : start + size] for start in range(0, len(members), size))

    def apply(self, logits: Tensor, rows: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Edited copies of logits [P, V] of P distinct rows: float32 [P, V]."""
        # Padding columns for values without a token; kernels read rows fastest from multiples of
        # 16, and compile once for all of them.
        columns = (self.vocab_size // 16 + 1) * 16
        wide = logits.new_empty(len(rows), columns, dtype=torch.float32)
        wide[:, self.vocab_size :] = 0.0
        edited = wide[:, : self.vocab_size].copy_(logits)
        members = list(enumerate(rows))
        self._apply_masks(edited, self._masks, {i: r for i, r in members if r in self._masked})
        filled = {i: self._places[r] + positions[i] for i, r in members if r in self._constraints}
        self._apply_masks(edited, self._filled, filled)
        places = np.full(self.num_rows, -1, dtype=np.int64)
        places[list(rows)] = np.arange(len(rows))
        place = indices(self.device, places)
        if any(row in self._entries for row in rows):
            self._add_entries(wide, place, positions)
        if any(row in self._seen for row in rows):
            self._penalise(wide, place, self._seen.span(rows))
        return edited

    def _apply_masks(self, edited: Tensor, table: Tensor | None, of: Mapping[int, int]) -> None:
        """Exclude the tokens that `table` does not allow; `of` maps logits to its rows."""
        if not of or table is None:
            return
        where, chosen = indices(self.device, [list(of), list(of.values())])
        codes = table.index_select(0, chosen).flatten().int()
        if len(self._space) < len(codes):  # kept: fresh pages would take longer than the rest
            self._space = torch.empty(len(codes), 8, device=self.device)
        numbers = torch.index_select(self._numbers, 0, codes, out=self._space[: len(codes)])
        numbers, first = numbers.view(len(of), -1)[:, : self.vocab_size], next(iter(of))
        if list(of) == list(range(first, first + len(of))):  # adjacent: six times as fast
            edited[first : first + len(of)].add_(numbers)
        else:
            edited.index_add_(0, where, numbers)

    def _add_entries(self, wide: Tensor, place: Tensor, positions: Sequence[int]) -> None:
        """Add the values of active entries: -inf for a ban, or a bias."""
        entries = self._entries
        owner, token = entries.owner, entries["token"]
        at = place[owner]  # [E], -1 for rows not in this step
        position = indices(self.device, positions)[at]
        holds = (at >= 0) & (position >= entries["since"]) & (position < entries["until"])
        before = entries["before"]
        if before.shape[1] and self._recent is not None:
            offsets = torch.arange(-before.shape[1], 0, device=self.device)
            recent = self._recent[owner[:, None], (position[:, None] + offsets) % RECENT]
            holds &= ((before == recent) | (before < 0)).all(dim=1)
        value = entries["value"].masked_fill(~holds, 0.0)
        wide.view(-1).index_add_(0, _flat(at, token, wide), value)

    def _penalise(self, wide: Tensor, place: Tensor, span: slice) -> None:
        columns = self._seen.owner, self._seen["token"], self._seen["count"]
        owner, token, count = (column[span] for column in columns)
        at = place.index_select(0, owner)  # much faster on a CPU than place[owner]
        repetition, frequency, presence = self._penalties.index_select(1, owner)
        where, values = _flat(at, token, wide), wide.view(-1)
        value = values.index_select(0, where)
        value = torch.where(value > 0, value / repetition, value * repetition)
        values.scatter_(0, where, value - frequency * count - presence * (count > 0))

    def drafts(self, row: int, proposed: list[int], most: int, forces: bool) -> list[int]:
        """Drafts for a row: those `proposed`, unless it has structured_outputs, which may exclude
        some and with `forces` propose others."""
        constraint = self._constraints.get(row)
        return proposed if constraint is None else constraint.drafts(proposed, most, forces)

    # ---- appending tokens ------------------------------------------------------------------

    def append(self, rows: Sequence[int], positions: Sequence[int], tokens: Tensor) -> None:
        """Append tokens, int64 [R], at `positions` to the sequences in these distinct rows."""
        if self._with_words and self._recent is not None:
            where, at = indices(self.device, [list(rows), list(positions)])
            self._recent[where, at % RECENT] = tokens
        members = [i for i, row in enumerate(rows) if row in self._room]
        if members:
            self._count([rows[i] for i in members], tokens[indices(self.device, members)])

    def follows(self, row: int) -> bool:
        """Whether the edits of a row depend on its tokens (bad words, penalties or constraints)."""
        return row in self._with_words or row in self._room or row in self._constraints

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that undoes every later `append`."""
        if not self._room:
            return lambda: None  # drafts overwrite only the oldest recent tokens
        seen, room = self._seen, dict(self._room)
        self._seen = seen.copy()

        def restore() -> None:
            self._seen, self._room = seen, room

        return restore

    def _count(self, rows: list[int], tokens: Tensor) -> None:
        """Count one token in each of these rows with penalties. A known token's count is increased;
        a new one goes to the next free place of the row's segment. The place is used up either way
        (padding for a known token), so the host tracks free places without reading the device."""
        for row in rows:
            if self._room[row] == 0:
                self._widen(row)
            self._room[row] -= 1
        seen, of = self._seen, indices(self.device, rows)
        chosen = torch.full((self.num_rows,), -1, device=self.device)
        chosen[of] = tokens
        match = seen["token"] == chosen[seen.owner]  # [T]
        seen["count"].add_(match)
        known = torch.zeros(self.num_rows, dtype=torch.int64, device=self.device)
        known = known.index_add_(0, seen.owner, match.long())[of] > 0
        ends = [seen.start(row) + seen.size(row) - self._room[row] for row in rows]
        free = indices(self.device, ends) - 1
        seen["token"][free] = torch.where(known, self.vocab_size, tokens)
        seen["count"][free] = torch.where(known, 0.0, 1.0)

    def _widen(self, row: int) -> None:
        """Double the segment of a row."""
        token, count = self._seen.of(row, "token"), self._seen.of(row, "count")
        more = torch.full_like(token, self.vocab_size)
        self._seen.put(row, token=torch.cat((token, more)), count=torch.cat((count, 0 * count)))
        self._room[row] = len(more)


@dataclass(frozen=True, slots=True)
class Entry:
    """Add `value` to the logit of `token` at positions `since` to `until` (exclusive), if the
    preceding tokens are `before`."""

    token: int
    value: float
    since: int = 0
    until: int = ALWAYS
    before: tuple[int, ...] = ()


def entries_of(request: SamplingRow) -> Iterator[Entry]:
    """The bans and biases of a request. Bad words are matched in the output only, as in vLLM."""
    for word in request.bad_words_ids:
        if word:
            since = request.first + len(word) - 1
            yield Entry(word[-1], -math.inf, since, before=tuple(word[:-1]))
    until = request.first + request.params.min_tokens
    if request.position < until:
        yield from (Entry(token, -math.inf, until=until) for token in request.stop_ids)
    for token, bias in (request.params.logit_bias or {}).items():
        yield Entry(token, bias)


def _flat(at: Tensor, token: Tensor, wide: Tensor) -> Tensor:
    """Flat indices into `wide` [P, columns]; entries without a row go to the last column."""
    width = wide.shape[1]
    return at.clamp(min=0) * width + token.masked_fill(at < 0, width - 1)
