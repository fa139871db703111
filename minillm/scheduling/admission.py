"""Who is let in next, and whether there is room for it: seats, tokens of this step, blocks."""

from minillm.cache.manager import BlockManager
from minillm.cache.prefix import Match
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.plan import Blocked
from minillm.scheduling.policies import ADMISSIONS, WINDOW, Policy
from minillm.scheduling.request import Key, Sequence, Status


class Admission:
    """Reads the books and changes none of them: `Scheduler` acts on what is decided here."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, policy: Policy):
        self.config, self.blocks, self.policy = config, blocks, policy
        self.headroom = 0  # blocks kept free for those who run
        if config.admission == "watermark":
            self.headroom = int(config.watermark * blocks.pool.num_blocks)
        self._target = ADMISSIONS[config.admission]
        self._order: list[Sequence] = []  # of a policy that reads the cache, at the last look
        self._oldest: Sequence | None = None  # who was first by arrival then
        self._stuck_at: int | None = None  # free blocks when the next one lacked blocks

    def queue(self, waiting: list[Sequence]) -> list[Sequence]:
        """Who is next. A policy that reads the cache orders the oldest ones anew, but not while
        the first one lacks blocks, no more are free and nobody older was preempted: looking up
        long prompts in vain in every step would delay those who run."""
        if not self.policy.reads_cache:
            return waiting
        stuck = self._stuck_at is not None and self.blocks.pool.num_free <= self._stuck_at
        if stuck and waiting[0] is self._oldest:
            self._order = [seq for seq in self._order if seq.status is Status.WAITING]
            if self._order:
                return self._order[:1]
        self._order, self._oldest = sorted(waiting[:WINDOW], key=self._key), waiting[0]
        return self._order

    def _key(self, sequence: Sequence) -> Key:
        cached = 0 if sequence.is_swapped else self.match(sequence).num_tokens
        return self.policy.key(sequence.request, sequence.arrival, cached)

    def pledge(self, sequence: Sequence) -> int:
        """Free blocks that a running sequence was promised when it was admitted."""
        return max(self.target(sequence) - len(sequence.table.blocks), 0)

    def target(self, sequence: Sequence) -> int:
        """Blocks that a sequence must be able to have."""
        return self._target(sequence, self.blocks.block_size)

    def match(self, sequence: Sequence) -> Match:
        """Its cached start. The last token is computed in any case, because its logits choose the
        next one; logprobs of a prompt need all of its logits."""
        wants_all = sequence.request.params.prompt_logprobs is not None
        limit = 0 if wants_all else sequence.num_tokens - 1
        return self.blocks.match(sequence.token_ids, limit, sequence.request.cache_salt)

    def decide(
        self, sequence: Sequence, seats: int, budget: int, available: int
    ) -> Match | Blocked:
        """The prefix to begin with (an empty one for a swapped sequence), or what is missing."""
        self._stuck_at = None
        if sequence.num_seats > seats:
            return Blocked.of(sequence, "seats", sequence.num_seats, seats)
        if budget == 0:
            return Blocked.of(sequence, "tokens", 1, 0)
        target, match = self.target(sequence), Match([], 0, None)
        if sequence.is_swapped:
            needed, left = max(target, len(sequence.table.host_blocks)), sequence.num_uncomputed
        else:
            match = self.match(sequence)
            needed = self.blocks.cost_of(match, target)
            if needed > available and match.partial is not None:
                match = self.blocks.whole(match)  # its block and the copy do not fit both
                needed = self.blocks.cost_of(match, target)
            left = sequence.num_tokens - match.num_tokens
        if left > budget and not self.config.enable_chunked_prefill:
            return Blocked.of(sequence, "tokens", left, budget)
        if needed > available:
            self._stuck_at = self.blocks.pool.num_free
            return Blocked.of(sequence, "blocks", needed, available)
        return match
