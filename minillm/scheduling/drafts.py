"""How many tokens are drafted for each sequence of a step (speculative decoding).

    row without drafts    [ last token ]                       one logit, one new token
    row with k drafts     [ last token ][ d1 ] ... [ dk ]      k + 1 logits, 1 to k + 1 new tokens

A plan names counts only: the executor proposes the tokens. Drafts take what a step leaves over,
free blocks and tokens of the budget, so a draft never delays or preempts another sequence. Blocks
beyond the accepted tokens are given back at the commit. So rejected tokens cost counting only:
nothing is copied, and nothing of them is indexed, forked or swapped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minillm.cache.manager import BlockManager
from minillm.scheduling.ahead import end_of
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.record import Drafted, StepRecord
from minillm.scheduling.request import Sequence as ScheduledSequence
from minillm.scheduling.request import Status
from minillm.scheduling.rows import Sampled


@dataclass
class Drafts:
    """The number of drafts of every row: at most `num_tokens`.

    Attributes:
        num_tokens: drafts of a row at most (k).
        max_num_seqs: with more running sequences there are no drafts; None is no limit.
        max_position: no token at this position or beyond is drafted: the context of a draft model.
    """

    num_tokens: int
    max_num_seqs: int | None = None
    max_position: int | None = None

    def lengths(self, sequences: Sequence[ScheduledSequence]) -> list[int]:
        """How many drafts each of these decoding sequences shall have; at most `num_tokens`."""
        return [self.num_tokens] * len(sequences)

    def observe(self, sequence: ScheduledSequence, num_drafted: int, num_accepted: int) -> None:
        """A row was verified; a policy that adapts learns from it."""

    def watch(self, record: StepRecord) -> None:
        """A plan is made, and this is its record: complete once it was delivered. A policy that
        adapts learns from those before."""

    def settle(
        self,
        sequence: ScheduledSequence,
        own: Sampled,
        num_drafted: Mapping[int, int] | None,
        blocks: BlockManager,
    ) -> Drafted:
        """A row was committed: blocks that hold nothing but rejected drafts are free again. `own`
        are its new tokens, of which the last was not drafted, or has failed."""
        num_accepted = max(len(own) - max(own.count(None), 1), 0)
        blocks.trim(sequence.table, sequence.num_certain)
        kept, seq_id = len(sequence.table.blocks), sequence.seq_id
        if sequence.num_sent is not None:
            sequence.num_sent = min(sequence.num_sent, kept)
        drafted = Drafted(seq_id, (num_drafted or {}).get(seq_id, 0), num_accepted, kept)
        self.observe(sequence, drafted.num_drafted, num_accepted)
        return drafted

    def wants(self, sequence: ScheduledSequence, num_running: int) -> bool:
        """Whether a sequence may have drafts in its next row, which then needs its last token."""
        few = self.max_num_seqs is None or num_running <= self.max_num_seqs
        return few and self.num_tokens > 0 and sequence.request.max_tokens > 1

    def extend(
        self,
        plan: StepPlan,
        sequences: Mapping[int, ScheduledSequence],
        num_running: int,
        blocks: BlockManager,
        config: SchedulerConfig,
    ) -> None:
        """Add drafts to the decode rows of a plan, from the tokens and blocks that are left."""
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

    def _room(self, sequence: ScheduledSequence) -> int:
        """Tokens that can be drafted before the last one there can be, which is never computed."""
        room = end_of(sequence) - sequence.num_tokens - 1
        if self.max_position is not None:
            room = min(room, self.max_position - sequence.num_tokens)
        return room


def can_draft(row: Row, sequence: ScheduledSequence) -> bool:
    """Whether a row computes the last token of a sequence, and that token is known."""
    decodes = row.num_tokens == 1 and row.num_logits == 1 and not row.num_forks
    generated = row.start >= len(sequence.request.prompt_token_ids)
    running = sequence.status is Status.RUNNING
    return decodes and generated and running and not sequence.num_pending


def with_drafts(row: Row, count: int, sequence: ScheduledSequence, blocks: BlockManager) -> Row:
    """The same row with so many drafts, and blocks to write them in."""
    table = sequence.table
    before = len(table.blocks)
    blocks.grow(table, row.start, row.start + 1 + count)  # its last block is its own already
    sequence.num_sent = len(table.blocks)
    return row._replace(
        num_tokens=1 + count,
        num_logits=1 + count,
        blocks=row.blocks + tuple(table.blocks[before:]),
    )
