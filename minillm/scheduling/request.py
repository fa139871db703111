"""Requests and their sequences: the state that the scheduler keeps of each."""

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from minillm.api.outputs import PrefixReport
from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockTable

Key = tuple[float, ...]  # sort key of the queues; the smallest is first


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its sampling parameters, validated for the model."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int  # at most what the context length allows; 0: only compute the prompt
    prompt: str | None = None
    seed: int = 0  # for sampling, the same for all `params.n` completions
    priority: int = 0  # lower is more urgent; only for the policy "priority"
    cache_salt: str = ""  # prompts with different salts never share cached blocks
    stop_ids: tuple[int, ...] = ()  # end a completion; masked until `params.min_tokens`
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # `params.bad_words`, tokenized
    arrival: float = field(default_factory=time.perf_counter)  # in seconds

    @property
    def max_computed(self) -> int:
        """Maximum number of KV cache positions. The KV of the last new token is never computed."""
        return len(self.prompt_token_ids) + max(self.max_tokens - 1, 0)


class Status(Enum):
    """The state of a sequence. A waiting sequence is new or preempted (maybe swapped out)."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One completion of a request: its tokens, its block table, and how far it is computed.

        token_ids      | prompt .............. | generated .... |
        num_pending                                             |..|  of steps in flight
        num_tokens     ------------------------------------------->|
        num_committed  ------------>|               in the KV cache: cached, or by committed steps
        num_computed   ------------------>|         and by steps in flight; behind it: uncomputed
        furthest       ------------------------>|   the largest `num_committed`: recomputed up to it
        table          [ 0 ][ 1 ][ 2 ][ 3 ]         blocks
        num_sent       ---------->|                 blocks that the executor knows

    Prefill and decode differ only in the number of uncomputed tokens: in decode it is 1. Forks,
    swaps and the prefix cache use generated tokens only once they are committed.

    A request starts as one sequence. When its prompt is computed, the other `n - 1` completions
    fork from it. A sequence counts as one of `max_num_seqs`, and until then one per future fork.
    """

    __slots__ = (
        "arrival", "awaits_commit", "end", "furthest", "index", "is_void", "key", "last_step",
        "num_accepted_tokens", "num_committed", "num_computed", "num_draft_tokens", "num_forks",
        "num_in_flight", "num_pending", "num_preemptions", "num_prompt_tokens", "num_recomputed",
        "num_sent", "report", "request", "seq_id", "status", "table", "token_ids",
    )  # fmt: skip

    def __init__(self, seq_id: int, request: Request, index: int, arrival: int, key: Key):
        self.seq_id, self.request, self.index = seq_id, request, index
        self.arrival = arrival  # number of earlier requests
        self.key = key  # from the scheduling policy; the smallest is first
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.end = self.num_prompt_tokens + request.max_tokens  # maximum `len(token_ids)`
        self.table = BlockTable(request.cache_salt)
        self.status = Status.WAITING
        self.num_committed = self.num_computed = self.num_pending = self.furthest = 0
        self.num_sent: int | None = None  # None: the executor does not know the sequence
        self.num_forks = request.params.n - 1 if index == 0 else 0
        self.num_in_flight = 0  # number of uncommitted plans that have a row for it
        self.awaits_commit = False  # must wait for the commit of its previous row
        self.last_step = 0  # number of the newest plan that has a row for it
        self.is_void = False  # it read blocks of a failed row: recompute it (`failed_rows.py`)
        self.num_recomputed = 0
        self.num_preemptions = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.report: PrefixReport | None = None  # prefix cache hits and misses, once admitted

    @property
    def num_tokens(self) -> int:
        """Known tokens, and those that uncommitted plans will sample."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are not computed."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    def advance(self, start: int, end: int) -> int:
        """Commit positions `start` to `end`; returns how many of them were computed before."""
        again = 0
        if start < self.furthest:
            again = min(end, self.furthest) - start
            self.num_recomputed += again
        self.restart(end)
        return again

    def restart(self, num_computed: int) -> None:
        """Set `num_committed`, and forget uncommitted plans: `ahead.py` counts these again."""
        self.num_committed = self.num_computed = num_computed
        self.num_pending, self.awaits_commit, self.is_void = 0, False, False
        if num_computed > self.furthest:
            self.furthest = num_computed

    @property
    def num_seqs(self) -> int:
        """Its share of `max_num_seqs`: one for itself, and one per future fork."""
        return 1 + self.num_forks

    @property
    def is_swapped(self) -> bool:
        """Whether its blocks are in host memory."""
        return bool(self.table.host_blocks)
