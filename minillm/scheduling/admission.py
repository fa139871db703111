"""Admission: whether a request fits at all, and whether the next waiting sequence may run now."""

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter

from minillm.cache.blocks import AccountingError
from minillm.cache.manager import BlockManager
from minillm.cache.prefix import Match
from minillm.errors import InvalidRequestError
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.policies import ADMISSIONS, WINDOW, Policy
from minillm.scheduling.record import Blocked, StepRecord
from minillm.scheduling.request import Key, Request, Sequence, Status

MAX_REPEATED_REFUSALS = 16  # steps that reuse a refusal without another cache lookup


@dataclass(slots=True)
class Refusal:
    """A waiting sequence that lacked blocks. Later steps repeat the refusal while it holds."""

    blocked: Blocked
    sequence: Sequence
    oldest: Sequence | None  # `waiting[0]` at the time
    num_free: int  # free blocks at the time
    steps_left: int  # steps that may still repeat it


class Admission:
    """Decides which waiting sequences are admitted; `Scheduler` then changes queues and blocks."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, policy: Policy):
        self.config, self.blocks, self.policy = config, blocks, policy
        self.headroom = 0  # blocks kept free for the growth of running sequences
        if config.admission == "watermark":
            self.headroom = int(config.watermark * blocks.pool.num_blocks)
        self._target = ADMISSIONS[config.admission]
        self._oldest: Sequence | None = None  # `waiting[0]` at the last call of `queue`
        self._refusal: Refusal | None = None

    def refusal(
        self,
        waiting: list[Sequence],
        running: list[Sequence],
        free_seqs: int,
        budget: int,
        record: StepRecord,
    ) -> Blocked | None:
        """Why no request can be admitted, if known without a cache lookup; else None."""
        first = waiting[0]
        if not free_seqs:
            return Blocked.of(first, "batch slots", first.num_seqs, 0)
        if not budget:
            return Blocked.of(first, "tokens", 1, 0)
        if record.preempted or record.stalled:
            return Blocked.of(first, "blocks", self.target(first), 0)
        return self.last_refusal(waiting, running) if running else None

    def last_refusal(self, waiting: list[Sequence], running: list[Sequence]) -> Blocked | None:
        """The last refusal for lack of blocks, if it most likely still holds; else None.

        Repeating it saves a prefix cache lookup per step. If another request has since cached the
        prefix, admission finds it after at most `MAX_REPEATED_REFUSALS` steps.
        """
        last = self._refusal
        if (
            last is None
            or last.steps_left == 0
            or last.sequence.status is not Status.WAITING
            or last.oldest is not waiting[0]
            or last.num_free < self.blocks.pool.num_free
        ):
            return None
        available = self.blocks.pool.num_free - self.num_reserved(running) - self.headroom
        if available >= last.blocked.needed:  # enough now: running sequences reserve fewer blocks
            return None
        last.steps_left -= 1
        return last.blocked._replace(available=available)

    def queue(self, waiting: list[Sequence]) -> list[Sequence]:
        """Waiting sequences in order of admission, at most `WINDOW` for a `reads_cache` policy."""
        self._oldest = waiting[0]
        if not self.policy.reads_cache:
            return waiting
        return sorted(waiting[:WINDOW], key=self._key)

    def _key(self, sequence: Sequence) -> Key:
        cached = 0 if sequence.is_swapped else self.match(sequence).num_tokens
        return self.policy.key(sequence.request, sequence.arrival, cached)

    def num_reserved(self, running: list[Sequence]) -> int:
        """Free blocks that running sequences reserve."""
        return sum(map(self.num_reserved_for, running))

    def num_reserved_for(self, sequence: Sequence) -> int:
        """Free blocks that one running sequence reserves: its target minus its blocks."""
        return max(self.target(sequence) - len(sequence.table.blocks), 0)

    def target(self, sequence: Sequence) -> int:
        """Blocks that the admission policy requires for a sequence."""
        return self._target(sequence, self.blocks.block_size)

    def match(self, sequence: Sequence) -> Match:
        """The cached prefix of a sequence, without its last token, whose logits are needed. With
        `prompt_logprobs` it is empty until the whole prompt has been computed once."""
        request = sequence.request
        wanted = request.params.prompt_logprobs is not None
        needs_all = wanted and sequence.furthest < len(request.prompt_token_ids)
        limit = 0 if needs_all else sequence.num_tokens - 1
        return self.blocks.match(sequence.token_ids, limit, request.cache_salt)

    def decide(
        self, sequence: Sequence, free_seqs: int, budget: int, available: int
    ) -> Match | Blocked:
        """Admit: returns the cached prefix (empty if swapped out). Refuse: returns the reason."""
        self._refusal = None
        if sequence.num_seqs > free_seqs:
            return Blocked.of(sequence, "batch slots", sequence.num_seqs, free_seqs)
        if budget == 0:
            return Blocked.of(sequence, "tokens", 1, 0)
        target, match = self.target(sequence), Match([], 0, None)
        if sequence.is_swapped:
            needed, left = max(target, len(sequence.table.host_blocks)), sequence.num_uncomputed
        else:
            match = self.match(sequence)
            needed = self.blocks.cost_of(match, target)
            if needed > available and match.partial is not None:
                match = self.blocks.whole(match)  # no room for the partial block and its copy
                needed = self.blocks.cost_of(match, target)
            left = sequence.num_tokens - match.num_tokens
        if left > budget and not self.config.enable_chunked_prefill:
            return Blocked.of(sequence, "tokens", left, budget)
        if needed > available:
            blocked = Blocked.of(sequence, "blocks", needed, available)
            num_free = self.blocks.pool.num_free
            self._refusal = Refusal(
                blocked, sequence, self._oldest, num_free, MAX_REPEATED_REFUSALS
            )
            return blocked
        return match


def insert(queue: list[Sequence], sequence: Sequence) -> None:
    """Insert a sequence in order."""
    insort(queue, sequence, key=attrgetter("key"))


def remove(queue: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence."""
    place = bisect_left(queue, sequence.key, key=attrgetter("key"))
    if place >= len(queue) or queue[place] is not sequence:
        raise AccountingError(f"Sequence {sequence.seq_id} is not in this queue.")
    del queue[place]


def check_fits(request: Request, config: SchedulerConfig, blocks: BlockManager) -> None:
    """Raise InvalidRequestError if the request would not fit even alone."""
    n = request.params.n
    if n > config.max_num_seqs:
        raise InvalidRequestError(
            f"n is {n}, but at most {config.max_num_seqs} sequences run at once; lower n or "
            "raise max_num_seqs."
        )
    positions, size = request.max_computed, blocks.block_size
    lengths = f"{len(request.prompt_token_ids)} prompt + {request.max_tokens} new tokens"
    one = blocks.blocks_for(positions)
    # The admission policy may need more blocks; if the pool is smaller, the request never runs.
    needed = max(one, ADMISSIONS[config.admission](Sequence(-1, request, 0, 0, ()), size))
    if needed > blocks.pool.num_blocks:
        raise InvalidRequestError(
            f"The request can never fit: {lengths}{f', n = {n},' * (needed > one)} need {needed} "
            f"blocks of {size} positions, and the KV cache has {blocks.pool.num_blocks}; lower "
            f"max_tokens{' or n' * (needed > one)}, or give the cache more memory."
        )
    if not config.enable_chunked_prefill and positions > config.max_num_batched_tokens:
        raise InvalidRequestError(
            f"The request can never fit: {lengths} may have to be computed in one step, which "
            f"has {config.max_num_batched_tokens} tokens; raise max_num_batched_tokens or "
            "set enable_chunked_prefill=True."
        )
