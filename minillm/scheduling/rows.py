"""Rows of a plan: how they are built and ordered, and how their sampled tokens are accepted."""

from collections.abc import Collection

from minillm.cache.manager import BlockManager
from minillm.scheduling.plan import NewSequence, Row, StepPlan
from minillm.scheduling.record import Blocked
from minillm.scheduling.request import Sequence

Sampled = list[int | None]  # sampled tokens of one row; None: sampling failed


def next_row(plan: StepPlan, sequence: Sequence, num_tokens: int, blocks: BlockManager) -> Row:
    """Build the row for the next `num_tokens` tokens of a sequence, and allocate its blocks.

    Adds to the plan the copy-on-write that the row needs, and the sequence if it is new to the
    executor.
    """
    start, table = sequence.num_computed, sequence.table
    kept = sequence.num_sent
    copy = blocks.grow(table, start, start + num_tokens)
    if kept is None:
        kept = 0
        plan.new.append(described(sequence))
    if copy is not None:
        plan.copies.append(copy)
        kept = min(kept, start // blocks.block_size)
    prompt = sequence.num_prompt_tokens
    if start < prompt:  # later rows of this plan may already share its full blocks
        end = min(start + num_tokens, prompt)
        blocks.index_blocks(table, sequence.token_ids, end, plan.step)
    sequence.num_sent = len(table.blocks)
    new = tuple(table.blocks[kept:]) if kept < len(table.blocks) else ()
    if num_tokens < sequence.num_uncomputed or sequence.end == prompt:
        return Row(sequence.seq_id, start, num_tokens, 0, 0, kept, new)
    return Row(sequence.seq_id, start, num_tokens, 1, sequence.num_forks, kept, new)


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
        request.cache_salt,
    )


def put_in_order(rows: list[Row], readers: Collection[int]) -> None:
    """Sort rows of one token to the front, except `readers` (seq_ids), which must stay behind the
    rows whose blocks they read. Most steps have only one-token rows and need no sorting."""
    if readers or any(row.num_tokens > 1 for row in rows):
        rows.sort(key=lambda row: row.num_tokens > 1 or row.seq_id in readers)


def accept(sequence: Sequence, tokens: Sampled) -> bool:
    """Append accepted tokens up to `max_tokens`; returns whether sampling failed."""
    room = sequence.end - len(sequence.token_ids)
    if len(tokens) == 1 and room > 0 and tokens[0] is not None:  # the usual case
        sequence.token_ids.append(tokens[0])
        return False
    accepted = [token for token in tokens[:room] if token is not None]
    sequence.token_ids += accepted
    return len(accepted) < len(tokens[:room])


def why_stalled(sequence: Sequence, budget: int, blocks: BlockManager) -> Blocked:
    """Why a running sequence got no row: no tokens left in the budget, or no free blocks."""
    if not budget:
        return Blocked.of(sequence, "tokens", 1, 0)
    start = sequence.num_computed
    needed = blocks.num_needed(sequence.table, start, start + 1)
    return Blocked.of(sequence, "blocks", needed, blocks.pool.num_free)
