"""Drafts in the histories of `machine.py`: how many a row gets, what is guessed, what comes of it.

Guesses are right with some probability, else wrong, sometimes fewer than the plan has room for,
sometimes none. They follow from the step and the sequence alone, so a history that fails can be
shrunk.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from random import Random
from typing import Any

from minillm.scheduling.drafts import Drafts
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.record import Counters, Drafted, StepRecord
from minillm.scheduling.request import Sequence as ScheduledSequence
from minillm.scheduling.scheduler import Scheduler
from tests.scheduling.oracle import VOCABULARY, Expected, RunnerRow, num_drafts, require

# Simple values first, as in `machine.SETUPS`.
DRAFTS: Mapping[str, tuple[Any, ...]] = {
    "drafts": (4, 1, 2, 8), "disable_by_batch": (None, None, 2, 4),
    "draft_context": (None, None, None, 20), "uneven": (False, True),
}  # fmt: skip
CHANCES = (1.0, 0.8, 0.5, 0.0)  # that a guess is right
EVERY = 5  # steps of which one is planned a second time, without drafts


def drafting(seed: int) -> dict[str, Any]:
    """The part of a setup that is about drafts; the rest of the history is as without them."""
    rng = Random(f"drafts {seed}")
    return {name: rng.choice(values) for name, values in DRAFTS.items()}


class Uneven(Drafts):
    """Another number of drafts for each sequence in each step, often none."""

    def lengths(self, sequences: Sequence[ScheduledSequence]) -> list[int]:
        return [hash((one.seq_id, one.num_tokens)) % (self.num_tokens + 1) for one in sequences]


def drafts_of(setup: Any) -> Drafts | None:
    """What the scheduler of a setup drafts by."""
    if setup.drafts is None:
        return None
    kind = Uneven if setup.uneven else Drafts
    return kind(setup.drafts, setup.disable_by_batch, setup.draft_context)


def guess(row: Row, known: RunnerRow, expected: Expected) -> list[int]:
    """Tokens that may follow, at most as many as the row has room for."""
    rng = Random(hash((row.seq_id, row.start, row.num_tokens)))
    chance = rng.choice(CHANCES)
    done, room = len(known.token_ids) - len(known.request.prompt_token_ids), num_drafts(row)
    count = rng.choice((room, room, room, rng.randrange(room + 1), 0))
    right = expected.first(done + count)[done:]
    return [
        token if rng.random() < chance else (token + rng.randrange(1, VOCABULARY)) % VOCABULARY
        for token in right
    ]


class Books:
    """What became of all drafts, counted a second time."""

    def __init__(self, coverage: Counter[str]):
        self.coverage = coverage
        self.num_drafts = self.num_drafted = self.num_accepted = 0
        self.accepted_at: Counter[int] = Counter()
        self.drafting: set[int] = set()  # sequences that had drafts
        self._rows: dict[int, tuple[int, int]] = {}  # of the step that is committed

    def verified(self, row: Row, drafted: int, told: Sequence[int | None]) -> None:
        """A row that could have drafts had so many, and gets these tokens."""
        whole = told.count(None) == 0
        accepted = len(told) - 1 if whole else len(told) - told.count(None)
        self._rows[row.seq_id] = drafted, accepted
        self.num_drafts += drafted > 0
        self.drafting |= {row.seq_id} if drafted else set()
        self.num_drafted += drafted
        self.num_accepted += accepted
        self.accepted_at.update(range(accepted))
        seen = self.coverage
        seen["rows with drafts"] += drafted > 0
        seen["fewer drafts than planned"] += 0 < drafted < num_drafts(row)
        seen["nothing drafted"] += drafted == 0
        seen["all accepted"] += 0 < drafted == accepted
        seen["some accepted"] += 0 < accepted < drafted
        seen["all rejected"] += accepted == 0 < drafted

    def cut(self, row: Row, told: int, num_cut: int) -> None:
        """The last `num_cut` of the tokens that a row was told come after the end of its text, so
        no draft among them was accepted."""
        if num_drafts(row):
            self.num_accepted -= num_cut
            self.accepted_at.subtract(range(told - 1 - num_cut, told - 1))
            self.accepted_at += Counter()  # without zeros

    def check(self, counters: Counters, record: StepRecord) -> None:
        """After a commit."""
        told = {seq_id: (each.num_drafted, each.num_accepted) for seq_id, each in by_id(record)}
        require(told == self._rows, "counters", "drafted", told, self._rows)
        self._rows = {}
        ours = self.num_drafts, self.num_drafted, self.num_accepted
        theirs = counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens
        require(ours == theirs, "counters", "drafts", ours, theirs)
        at = {place: count for place, count in enumerate(counters.num_accepted_at) if count}
        require(at == dict(self.accepted_at), "counters", "accepted at", at, self.accepted_at)


def by_id(record: StepRecord) -> list[tuple[int, Drafted]]:
    """What a record says of drafts, once for each row."""
    listed = [(each.seq_id, each) for each in record.drafted]
    require(len(dict(listed)) == len(listed), "counters", "drafted twice", listed)
    return listed


Plain = tuple[Any, ...]


def without_drafts(scheduler: Scheduler) -> Plain:
    """What the next plan would be if nothing were drafted from now on."""
    other = deepcopy(scheduler)
    other.drafts = None
    return decisions(other, other.schedule())


def decisions(scheduler: Scheduler, plan: StepPlan) -> Plain:
    """What a plan decides, but for its drafts."""
    record = scheduler.record
    rows = {
        row.seq_id: (row.start, row.num_tokens - num_drafts(row), row.num_samples - num_drafts(row))
        for row in plan.rows
    }
    moves = plan.swap_in, plan.swap_out, plan.copies
    return rows, moves, record.admitted, record.preempted, record.stalled, record.blocked


def check_room(scheduler: Scheduler, rows: Mapping[int, Row], draft_context: int | None) -> None:
    """Drafts keep to the limits of their sequence and of their proposer."""
    most = scheduler.drafts.num_tokens if scheduler.drafts else 0
    limit = scheduler.drafts.max_num_seqs if scheduler.drafts else None
    for seq_id, row in rows.items():
        count = num_drafts(row)
        if not count:
            continue
        request, end = scheduler.sequences[seq_id].request, row.start + row.num_tokens
        require(count <= most, "limits", "drafts of", row)
        require(limit is None or len(scheduler.running) <= limit, "limits", "too many draft")
        require(row.start >= len(request.prompt_token_ids), "limits", "a prompt drafts", row)
        require(not row.num_forks, "limits", "a row that forks drafts", row)
        require(end <= request.max_computed, "limits", "beyond the last token", row)
        require(draft_context is None or end <= draft_context, "limits", "beyond a context", row)
