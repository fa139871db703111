"""A device without a model: its next token is a hash of all it reads through the block table.

What a slot holds stands for keys and values, so it depends on all tokens up to its position:

    slot(p) = f(slot(p - 1), token(p)),      slot(-1) = g(salt)
    next token = h(slot(0), ..., slot(p), seed, index of the completion)

`slot(p - 1)` is read back from memory too. Any mix-up of blocks, of their order, or of the time at
which one is copied therefore changes a token. `Expected` computes the same from the prompt alone,
without blocks and without a scheduler.

Rows are computed one after another, as by a device that runs tiles or isolates a failure: what a
row reads must have been written by an earlier step or by a row before it. A row that is `broken`
writes garbage, and a row that reads garbage, or a slot that was never written, is tainted.

A row with several logits verifies drafts: it writes what they would put into their slots, draws at
each position from what it reads there, and keeps what it drew as long as the drafts before were
that. The slots of rejected drafts hold what no sequence has, so a token that is drawn from one of
them is wrong.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from minillm.scheduling.plan import NewSequence, Row, StepPlan
from minillm.scheduling.request import Request, Sequence

VOCABULARY = 5  # small, so that many sequences share the beginning of a block
PRIME = 2**61 - 1
FACTOR = 6364136223846793005


class Slot(NamedTuple):
    """What memory holds for one position, and what the position before it held."""

    value: int
    before: int


def root(salt: str) -> int:
    """What stands before the first position. Keys and values of two salts never agree."""
    return crc32(salt.encode())


def after(before: int, token: int) -> int:
    """What a position holds."""
    return (before * FACTOR + token + 1) % PRIME


def fingerprint(values: Iterable[int], seed: int, index: int) -> int:
    """What the logits are to a sampler; hashes of tuples of integers are the same everywhere."""
    return hash((seed, index, *values))


class Broken(AssertionError):
    """A promise was broken; `kind` names the promise."""

    def __init__(self, kind: str, message: object):
        super().__init__(f"{kind}: {message}")
        self.kind = kind


def require(condition: object, kind: str, *facts: object) -> None:
    """Raise `Broken` unless the condition holds."""
    if not condition:
        raise Broken(kind, ", ".join(map(str, facts)))


class Expected:
    """The tokens of one completion, from its prompt alone."""

    def __init__(self, request: Request, index: int):
        self.request, self.index = request, index
        self.tokens: list[int] = []
        self.fingerprints: list[int] = []
        self._values: list[int] = []
        self._extend(request.prompt_token_ids)

    def fingerprint(self, place: int) -> int:
        """What new token number `place` is drawn from."""
        while len(self.fingerprints) <= place:
            drawn = fingerprint(self._values, self.request.seed, self.index)
            self.fingerprints.append(drawn)
            self.tokens.append(drawn % VOCABULARY)
            self._extend(self.tokens[-1:])
        return self.fingerprints[place]

    def first(self, count: int) -> list[int]:
        """The first new tokens."""
        if count:
            self.fingerprint(count - 1)
        return self.tokens[:count]

    def value(self, position: int) -> int:
        """What a position must hold, of the prompt or of the new tokens asked for so far."""
        return self._values[position]

    def values(self) -> list[int]:
        """What all positions hold that were asked for so far."""
        return self._values

    def _extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            before = self._values[-1] if self._values else root(self.request.cache_salt)
            self._values.append(after(before, token))


@dataclass
class RunnerRow:
    """What a runner knows of a sequence: only what plans told it, and what it sampled."""

    request: Request
    index: int
    token_ids: list[int]
    table: list[int]


class Sample(NamedTuple):
    """One drawn token: of which completion, which of its tokens, and from what."""

    completion: int
    place: int
    fingerprint: int


# What a row is to go on with, as many as it has logits less one, or fewer.
Propose = Callable[[Row, RunnerRow], list[int]]

# The order in which `StepPlan` must be carried out. A test of the tests changes it.
ORDER = ("forget", "learn", "swap_out", "copies", "swap_in", "write")


class Runner:
    """Device memory, host memory, and persistent rows; `execute` carries out a plan."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int):
        self.block_size = block_size
        self._num_poisons = 0
        self.device = [self._poison() for _ in range(num_blocks)]
        self.host = [self._poison() for _ in range(num_host_blocks)]
        self.rows: dict[int, RunnerRow] = {}
        self.requests: dict[int, Request] = {}  # of new sequences: no plan tells of salts
        self.tainted: set[tuple[int, int]] = set()  # steps and sequences
        self._drawn: dict[int, list[Sample]] = {}
        self.propose: Propose = lambda row, known: []
        self.num_drafted: dict[int, int] = {}  # of the rows of the last plan that may have drafts
        self.order = ORDER  # looked up now, so that a test may change it

    def _poison(self) -> list[Slot]:
        """Garbage that never repeats."""
        self._num_poisons += 1
        return [Slot(-self._num_poisons, -self._num_poisons)] * self.block_size

    def poison(self, device: Iterable[int], host: Iterable[int]) -> None:
        """Overwrite what nobody may read any more."""
        for block in device:
            self.device[block] = self._poison()
        for block in host:
            self.host[block] = self._poison()

    def execute(self, plan: StepPlan, broken: Collection[int] = ()) -> dict[int, list[Sample]]:
        """One step; returns what each row with samples draws, and appends nothing."""
        self._drawn, self.num_drafted = {}, {}
        actions: dict[str, Callable[[StepPlan], None]] = {
            "forget": self._forget,
            "learn": self._learn,
            "swap_out": lambda plan: self._move(plan.swap_out, self.device, self.host),
            "copies": lambda plan: self._move(plan.copies, self.device, self.device),
            "swap_in": lambda plan: self._move(plan.swap_in, self.host, self.device),
            "write": lambda plan: self._compute(plan, broken),
        }
        for name in self.order:
            actions[name](plan)
        return self._drawn

    def append(self, seq_id: int, token: int) -> None:
        """The runner keeps what it sampled, so that no later plan need tell it."""
        self.rows[seq_id].token_ids.append(token)

    def slots(self, row: Row) -> list[tuple[int, int]]:
        """Block and offset of each position that a row writes."""
        table, size = self.rows[row.seq_id].table, self.block_size
        positions = range(row.start, row.start + row.num_tokens)
        return [(table[position // size], position % size) for position in positions]

    def _forget(self, plan: StepPlan) -> None:
        for seq_id in plan.dropped:
            require(seq_id in self.rows, "runner", f"{seq_id} is dropped, but has no row")
            del self.rows[seq_id]

    def _learn(self, plan: StepPlan) -> None:
        for new in plan.new:
            require(new.seq_id not in self.rows, "runner", f"{new.seq_id} is not new")
            self.rows[new.seq_id] = self._row(new)
        for row in plan.rows:
            require(row.seq_id in self.rows, "runner", f"{row.seq_id} has no row")
            self.rows[row.seq_id].table[row.num_kept :] = row.blocks
            known = len(self.rows[row.seq_id].token_ids)
            end = row.start + row.num_tokens - num_drafts(row)
            require(end <= known, "runner", f"{row} has unknown tokens")

    def _row(self, new: NewSequence) -> RunnerRow:
        request = self.requests[new.seq_id]
        prompt = new.token_ids[: new.num_prompt_tokens]
        require(prompt == request.prompt_token_ids, "runner", "prompt of", new)
        return RunnerRow(request, new.sample_index, list(new.token_ids), [])

    def hear(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> None:
        """What tests know of the sequences that a plan brings."""
        for new in plan.new:
            self.requests[new.seq_id] = sequences[new.seq_id].request

    def _move(
        self, moves: Iterable[tuple[int, int]], source: list[list[Slot]], target: list[list[Slot]]
    ) -> None:
        """Gather all, then scatter all: as one call on a device does it."""
        gathered = [(place, list(source[block])) for block, place in moves]
        for place, contents in gathered:
            target[place] = contents

    def _compute(self, plan: StepPlan, broken: Collection[int]) -> None:
        for planned in plan.rows:
            row, drafts = self._drafted(planned)
            self._write(row, drafts)
            if row.seq_id in broken:
                for block, offset in self.slots(row):
                    self.device[block][offset] = self._poison()[0]
            if any(value < 0 for value in self._values(row)):
                self.tainted.add((plan.step, row.seq_id))
            if row.num_logits > 1:
                self._drawn[row.seq_id] = self._verify(row, drafts)
            elif row.num_samples:
                self._drawn[row.seq_id] = self._draw(row)

    def _drafted(self, row: Row) -> tuple[Row, list[int]]:
        """The row with as many tokens as there are drafts, and these."""
        if row.num_logits <= 1:
            return row, []
        drafts = self.propose(row, self.rows[row.seq_id])[: num_drafts(row)]
        if drafts:
            self.num_drafted[row.seq_id] = len(drafts)
        return row._replace(num_tokens=1 + len(drafts), num_logits=1 + len(drafts)), drafts

    def _write(self, row: Row, drafts: list[int]) -> None:
        known = self.rows[row.seq_id]
        before = self._value(known.table, row.start - 1, known.request.cache_salt)
        places = zip(self.slots(row), known.token_ids[row.start :] + drafts, strict=False)
        for (block, offset), token in places:
            value = after(before, token)
            self.device[block][offset] = Slot(value, before)
            before = value

    def _value(self, table: list[int], position: int, salt: str) -> int:
        if position < 0:
            return root(salt)
        return self.device[table[position // self.block_size]][position % self.block_size].value

    def _values(self, row: Row) -> list[int]:
        """What a row reads: all positions up to its last."""
        known, end = self.rows[row.seq_id], row.start + row.num_tokens
        blocks = known.table[: -(-end // self.block_size)]
        return [slot.value for block in blocks for slot in self.device[block]][:end]

    def _draw(self, row: Row) -> list[Sample]:
        known, end = self.rows[row.seq_id], row.start + row.num_tokens
        values = self._values(row)
        indices = range(row.num_samples) if row.num_samples > 1 else [known.index]
        place = end - len(known.request.prompt_token_ids)
        return [
            Sample(index, place, fingerprint(values, known.request.seed, index))
            for index in indices
        ]

    def _verify(self, row: Row, drafts: list[int]) -> list[Sample]:
        """One token at each position, up to the first that is not what was drafted there."""
        known, values = self.rows[row.seq_id], self._values(row)
        place = row.start + 1 - len(known.request.prompt_token_ids)
        drawn: list[Sample] = []
        for each in range(1 + len(drafts)):
            read = values[: row.start + 1 + each]
            mark = fingerprint(read, known.request.seed, known.index)
            drawn.append(Sample(known.index, place + each, mark))
            if each < len(drafts) and mark % VOCABULARY != drafts[each]:
                break
        return drawn


def num_drafts(row: Row) -> int:
    """How many drafts a row may have."""
    return max(row.num_logits - 1, 0)
