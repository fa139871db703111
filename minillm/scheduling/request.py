"""Requests and their sequences: the state that the scheduler keeps of each."""

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from minillm.api.outputs import PrefixReport
from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockTable
from minillm.scheduling.plan import NewSequence

Key = tuple[float, ...]  # sort key of the queues; the smallest is first


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its sampling parameters, validated for the model.

    Attributes:
        max_tokens: maximum new tokens, at most what the context length allows; 0 only computes the
            prompt.
        seed: seed for sampling, the same for all `params.n` completions.
        priority: lower is more urgent; used only by the policy "priority".
        cache_salt: prompts with different salts never share cached blocks.
        stop_ids: token ids that end a completion, masked until `params.min_tokens`.
        bad_words_ids: `params.bad_words`, tokenized.
        arrival: time in seconds, by `time.perf_counter`.
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
        """Maximum KV cache positions: all tokens but the last new one, which is never computed."""
        return len(self.prompt_token_ids) + max(self.max_tokens - 1, 0)


class Status(Enum):
    """The state of a sequence. A waiting sequence is new or preempted (maybe swapped out)."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One completion of a request: its tokens, its block table, and how far it is computed.

        token_ids   | prompt ............... | generated ... |
        num_computed ------------------>|
                     in the KV cache    | uncomputed: 1 token in decode, more in prefill

    This is the only difference between prefill and decode.

    The first `num_committed` positions are in the KV cache. `num_computed` may be larger: it also
    counts what uncommitted plans are expected to compute (`ahead.py`). Forks, swaps and the prefix
    cache use generated tokens only once they are committed.

    A request starts as one sequence. When its prompt is computed, the other `n - 1` completions
    fork from it. Until then it takes their seats, too: `num_seats` is 1 + `num_forks`.
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
        "num_committed",
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
        self.arrival = arrival  # number of requests that came before
        self.key = key  # from the scheduling policy; the smallest is first
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.end = self.num_prompt_tokens + request.max_tokens  # maximum `len(token_ids)`
        self.table = BlockTable(request.cache_salt)
        self.status = Status.WAITING
        self.num_committed = 0  # positions in the KV cache, by committed plans
        self.num_computed = 0  # positions, also those of uncommitted plans
        self.num_sent: int | None = None  # blocks known to the executor; None: unknown to it
        self.num_forks = request.params.n - 1 if index == 0 else 0
        self.furthest = 0  # positions computed at least once, also before a preemption
        self.num_in_flight = 0  # uncommitted plans with a row of it
        self.num_pending = 0  # tokens that an uncommitted plan samples
        self.awaits_commit = False  # its next row needs the commit of its last one
        self.last_step = 0  # the newest plan with a row of it
        self.is_void = False  # it read blocks of a failed row; recomputed (`doubt.py`)
        self.num_recomputed = 0
        self.num_preemptions = 0
        self.num_draft_tokens = 0  # drafted tokens of its rows
        self.num_accepted_tokens = 0  # drafted tokens that were accepted
        self.report: PrefixReport | None = (
            None  # prefix cache hits and misses at its first admission
        )

    @property
    def num_tokens(self) -> int:
        """Known tokens, and pending ones of uncommitted plans."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are not computed."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    def advance(self, start: int, end: int) -> int:
        """Commit positions `start` to `end`; returns how many of them were recomputed."""
        again = 0
        if start < self.furthest:
            again = min(end, self.furthest) - start
            self.num_recomputed += again
        self.restart(end)
        return again

    def restart(self, num_computed: int) -> None:
        """Set the number of committed positions; uncommitted plans no longer count."""
        self.num_committed = self.num_computed = num_computed
        self.num_pending, self.awaits_commit, self.is_void = 0, False, False
        if num_computed > self.furthest:
            self.furthest = num_computed

    @property
    def num_seats(self) -> int:
        """Seats it takes of `max_num_seqs`: its own, and one per completion not yet forked."""
        return 1 + self.num_forks

    @property
    def is_swapped(self) -> bool:
        """Whether its blocks are in host memory."""
        return bool(self.table.host_blocks)


def described(sequence: Sequence) -> NewSequence:
    """What the executor needs to know of a sequence."""
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
