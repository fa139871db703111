"""Requests, and the sequences they become: what the scheduler knows about each."""

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from minillm.api.outputs import PrefixReport
from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockTable
from minillm.scheduling.plan import NewSequence

Key = tuple[float, ...]  # places a sequence in line


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it, already checked against the model.

    Attributes:
        max_tokens: new tokens, limited to the room there is; 0 only computes the prompt.
        seed: of the random numbers; the same for all `params.n` completions.
        priority: lower is more urgent; only the policy "priority" looks at it.
        cache_salt: prompts with different salts never share a prefix.
        stop_ids: ids that end a completion, masked until `params.min_tokens`.
        bad_words_ids: `params.bad_words` as the tokenizer splits them.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    prompt: str | None = None
    seed: int = 0
    priority: int = 0
    cache_salt: str = ""
    stop_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    arrival: float = field(default_factory=time.perf_counter)

    @property
    def max_computed(self) -> int:
        """Positions that may have to be in the cache: all but that of the last new token."""
        return len(self.prompt_token_ids) + max(self.max_tokens - 1, 0)


class Status(Enum):
    """Where a sequence is. A waiting one may be new, preempted, or swapped out."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One completion of a request: its tokens, its blocks, and how far it is computed.

        token_ids   | prompt ............... | generated ... |
        num_computed ------------------>|
                     in the cache       | to be computed: one token when decoding, more in prefill

    There is no other difference between prefill and decode. Positions up to `num_certain` were
    committed; a plan made ahead counts on more of them (`ahead.py`). Only certain positions are
    indexed, forked, swapped and counted. Until its prompt is computed, the first sequence of a
    request also stands for the `num_forks` others, which need a seat each.
    """

    __slots__ = (
        "arrival",
        "awaits_commit",
        "end",
        "furthest",
        "index",
        "is_void",
        "key",
        "last_step",
        "num_accepted_tokens",
        "num_certain",
        "num_computed",
        "num_draft_tokens",
        "num_forks",
        "num_in_flight",
        "num_pending",
        "num_preemptions",
        "num_prompt_tokens",
        "num_recomputed",
        "num_sent",
        "report",
        "request",
        "seq_id",
        "status",
        "table",
        "token_ids",
    )

    def __init__(self, seq_id: int, request: Request, index: int, arrival: int, key: Key):
        self.seq_id, self.request, self.index = seq_id, request, index
        self.arrival = arrival  # how many requests came before
        self.key = key  # its place in the order of the policy
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.end = self.num_prompt_tokens + request.max_tokens  # of its tokens, at most
        self.table = BlockTable(request.cache_salt)
        self.status = Status.WAITING
        self.num_certain = 0  # positions that are in the cache for good
        self.num_computed = 0  # these, and those that a running plan is expected to add
        self.num_sent: int | None = None  # blocks of its table that the runner has; None: no row
        self.num_forks = request.params.n - 1 if index == 0 else 0
        self.furthest = 0  # positions that have been computed at least once
        self.num_in_flight = 0  # plans that have a row of it and are not committed
        self.num_pending = 0  # tokens to come, whose positions the next plan may compute already
        self.awaits_commit = False  # no plan is made ahead of the row that is running
        self.last_step = 0  # the newest plan that has a row of it
        self.is_void = False  # it reads what failed, and is computed again (`doubt.py`)
        self.num_recomputed = 0
        self.num_preemptions = 0
        self.num_draft_tokens = 0  # proposed for its rows, and of these
        self.num_accepted_tokens = 0  # that are its tokens
        self.report: PrefixReport | None = None  # of its first admission

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, and those that are on their way."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are missing."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    def advance(self, start: int, end: int) -> int:
        """Positions were computed; returns how many of them for another time."""
        again = 0
        if start < self.furthest:
            again = min(end, self.furthest) - start
            self.num_recomputed += again
        self.restart(end)
        return again

    def restart(self, num_computed: int) -> None:
        """So many positions are in the cache, for certain; nothing is counted on beyond them."""
        self.num_certain = self.num_computed = num_computed
        self.num_pending, self.awaits_commit, self.is_void = 0, False, False
        if num_computed > self.furthest:
            self.furthest = num_computed

    @property
    def num_seats(self) -> int:
        """Its share of `max_num_seqs`."""
        return 1 + self.num_forks

    @property
    def is_swapped(self) -> bool:
        """Whether its blocks are in host memory."""
        return bool(self.table.host_blocks)


def described(sequence: Sequence) -> NewSequence:
    """What an executor must know of a sequence."""
    request = sequence.request
    return NewSequence(
        sequence.seq_id,
        sequence.index,
        len(request.prompt_token_ids),
        tuple(sequence.token_ids),
        request.params,
        request.seed,
        request.stop_ids,
        request.bad_words_ids,
    )
