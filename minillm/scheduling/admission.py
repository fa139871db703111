"""Who is let in next, and whether there is room for it: seats, tokens of this step, blocks."""

from dataclasses import dataclass, replace

from minillm.cache.manager import BlockManager
from minillm.cache.prefix import Match
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.policies import ADMISSIONS, WINDOW, Policy
from minillm.scheduling.record import Blocked, StepRecord
from minillm.scheduling.request import Key, Sequence, Status

PATIENCE = 16  # steps


@dataclass(slots=True)
class Refusal:
    """Who lacked blocks, and how things stood then."""

    blocked: Blocked
    sequence: Sequence
    oldest: Sequence | None
    num_free: int
    patience: int


class Admission:
    """Reads the books and changes none of them: `Scheduler` acts on what is decided here."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, policy: Policy):
        self.config, self.blocks, self.policy = config, blocks, policy
        self.headroom = 0  # blocks kept free for those who run
        if config.admission == "watermark":
            self.headroom = int(config.watermark * blocks.pool.num_blocks)
        self._target = ADMISSIONS[config.admission]
        self._oldest: Sequence | None = None  # who was first by arrival at the last look
        self._refusal: Refusal | None = None

    def refusal(
        self,
        waiting: list[Sequence],
        running: list[Sequence],
        seats: int,
        budget: int,
        record: StepRecord,
    ) -> Blocked | None:
        """Why no request can be admitted, if that is known before anything is looked up."""
        first = waiting[0]
        if not seats:
            return Blocked.of(first, "seats", first.num_seats, 0)
        if not budget:
            return Blocked.of(first, "tokens", 1, 0)
        if record.preempted or record.stalled:
            return Blocked.of(first, "blocks", self.target(first), 0)
        return self.last_refusal(waiting, running) if running else None

    def last_refusal(self, waiting: list[Sequence], running: list[Sequence]) -> Blocked | None:
        """The last answer "no blocks", while hardly anything could have changed it. To look up
        long prompts in vain in every step would delay those who run; a prefix that somebody else
        has cached meanwhile is noticed after `PATIENCE` steps."""
        last = self._refusal
        if (
            last is None
            or last.patience == 0
            or last.sequence.status is not Status.WAITING
            or last.oldest is not waiting[0]
            or last.num_free < self.blocks.pool.num_free
        ):
            return None
        available = self.blocks.pool.num_free - self.pledged(running) - self.headroom
        if available >= last.blocked.needed:  # a promise was given up
            return None
        last.patience -= 1
        return replace(last.blocked, available=available)

    def queue(self, waiting: list[Sequence]) -> list[Sequence]:
        """Who is next; a policy that reads the cache orders the oldest ones anew."""
        self._oldest = waiting[0]
        if not self.policy.reads_cache:
            return waiting
        return sorted(waiting[:WINDOW], key=self._key)

    def _key(self, sequence: Sequence) -> Key:
        cached = 0 if sequence.is_swapped else self.match(sequence).num_tokens
        return self.policy.key(sequence.request, sequence.arrival, cached)

    def pledged(self, running: list[Sequence]) -> int:
        """Free blocks that were promised to those who run."""
        return sum(map(self.pledge, running))

    def pledge(self, sequence: Sequence) -> int:
        """Free blocks that a running sequence was promised when it was admitted."""
        return max(self.target(sequence) - len(sequence.table.blocks), 0)

    def target(self, sequence: Sequence) -> int:
        """Blocks that a sequence must be able to have."""
        return self._target(sequence, self.blocks.block_size)

    def match(self, sequence: Sequence) -> Match:
        """Its cached start. The last token is computed in any case, because its logits choose the
        next one; logprobs of a prompt need all of its logits, once."""
        request = sequence.request
        wanted = request.params.prompt_logprobs is not None
        needs_all = wanted and sequence.furthest < len(request.prompt_token_ids)
        limit = 0 if needs_all else sequence.num_tokens - 1
        return self.blocks.match(sequence.token_ids, limit, request.cache_salt)

    def decide(
        self, sequence: Sequence, seats: int, budget: int, available: int
    ) -> Match | Blocked:
        """The prefix to begin with (an empty one for a swapped sequence), or what is missing."""
        self._refusal = None
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
            blocked = Blocked.of(sequence, "blocks", needed, available)
            num_free = self.blocks.pool.num_free
            self._refusal = Refusal(blocked, sequence, self._oldest, num_free, PATIENCE)
            return blocked
        return match
