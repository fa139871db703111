"""Speculative decoding: how many tokens are drafted for each row of a step.

    row without drafts    [ last token ]                       one logit, one new token
    row with k drafts     [ last token ][ d1 ] ... [ dk ]      k + 1 logits, 1 to k + 1 new tokens

A plan contains only the number of drafts; the executor proposes the tokens. Drafts use the budget
and the free blocks that the other rows leave, so they never delay or preempt a sequence. The commit
frees the blocks behind the accepted tokens. Rejected tokens need no block copy, and never enter the
prefix cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from minillm.cache.manager import BlockManager
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.record import Drafted, StepRecord
from minillm.scheduling.request import Sequence, Status
from minillm.scheduling.rows import Sampled


@dataclass
class Drafts:
    """Draft policy with a fixed number of drafts per row; `AdaptiveDrafts` overrides it.

    Attributes:
        num_tokens: maximum number of drafted tokens per row (k).
        max_num_seqs: no drafts with more running sequences than this; None is no limit.
        max_position: drafts are at positions below this: the context length of a draft model.
    """

    num_tokens: int
    max_num_seqs: int | None = None
    max_position: int | None = None

    def lengths(self, sequences: list[Sequence]) -> list[int]:
        """Number of drafts for each of these decoding sequences, at most `num_tokens`."""
        return [self.num_tokens] * len(sequences)

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Called for each verified row; an adaptive policy learns from it."""

    def watch(self, record: StepRecord) -> None:
        """Called for each new plan, with its record, whose times are set once it is delivered. An
        adaptive policy learns from earlier records."""

    def free_rejected(
        self,
        sequence: Sequence,
        own: Sampled,
        num_drafted: Mapping[int, int] | None,
        blocks: BlockManager,
    ) -> Drafted:
        """Free the blocks that hold only rejected drafts of a committed row.

        `own` are its new tokens: the accepted drafts, then one sampled token (None if it failed).
        """
        num_accepted = max(len(own) - max(own.count(None), 1), 0)
        blocks.trim(sequence.table, sequence.num_committed)
        kept, seq_id = len(sequence.table.blocks), sequence.seq_id
        if sequence.num_sent is not None:
            sequence.num_sent = min(sequence.num_sent, kept)
        drafted = Drafted(seq_id, (num_drafted or {}).get(seq_id, 0), num_accepted, kept)
        self.observe(sequence, drafted.num_drafted, num_accepted)
        return drafted

    def wants(self, sequence: Sequence, num_running: int) -> bool:
        """Whether a sequence may have drafts in its next row, which then needs its last token."""
        few = self.max_num_seqs is None or num_running <= self.max_num_seqs
        return few and self.num_tokens > 0 and sequence.request.max_tokens > 1

    def extend(
        self,
        plan: StepPlan,
        sequences: Mapping[int, Sequence],
        num_running: int,
        blocks: BlockManager,
        config: SchedulerConfig,
    ) -> None:
        """Add drafts to the decode rows of a plan, within the remaining budget and free blocks."""
        if self.max_num_seqs is not None and num_running > self.max_num_seqs:
            return
        places = [i for i, row in enumerate(plan.rows) if can_draft(row, sequences[row.seq_id])]
        left = config.max_num_batched_tokens - sum(row.num_tokens for row in plan.rows)
        decoding = [sequences[plan.rows[i].seq_id] for i in places]
        for place, sequence, wanted in zip(places, decoding, self.lengths(decoding), strict=True):
            row = plan.rows[place]
            room = min(wanted, left, self._room(sequence))
            writable = blocks.num_writable(sequence.table, row.start) - 1
            count = min(room, writable)
            if count > 0:
                plan.rows[place] = with_drafts(row, count, sequence, blocks)
                left -= count

    def _room(self, sequence: Sequence) -> int:
        """Maximum number of drafts: the row yields one token more, up to `max_tokens` in all."""
        room = sequence.end - sequence.num_tokens - 1
        if self.max_position is not None:
            room = min(room, self.max_position - sequence.num_tokens)
        return room


def can_draft(row: Row, sequence: Sequence) -> bool:
    """Whether this is a plain decode row of a running sequence whose last token is known."""
    decodes = row.num_tokens == 1 and row.num_logits == 1 and not row.num_forks
    generated = row.start >= len(sequence.request.prompt_token_ids)
    running = sequence.status is Status.RUNNING
    return decodes and generated and running and not sequence.num_pending


def with_drafts(row: Row, count: int, sequence: Sequence, blocks: BlockManager) -> Row:
    """The row with `count` drafts, and blocks for them."""
    table = sequence.table
    before = len(table.blocks)
    blocks.grow(table, row.start, row.start + 1 + count)  # no copy-on-write
    sequence.num_sent = len(table.blocks)
    return row._replace(
        num_tokens=1 + count,
        num_logits=1 + count,
        blocks=row.blocks + tuple(table.blocks[before:]),
    )
