"""One row of a plan: what it takes from a sequence, and what its tokens add to it."""

from minillm.cache.manager import BlockManager
from minillm.scheduling.ahead import end_of
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.request import Sequence, described

Sampled = list[int | None]  # tokens of one row; None is a sample that failed


def next_row(plan: StepPlan, sequence: Sequence, num_tokens: int, blocks: BlockManager) -> Row:
    """The next `num_tokens` of a sequence, with blocks to write them in, and in the plan what the
    row needs: the copy that comes first, and the sequence itself if the executor lacks it."""
    start, table = sequence.num_computed, sequence.table
    kept = sequence.num_sent
    copy = blocks.grow(table, start, start + num_tokens)
    if kept is None:
        kept = 0
        plan.new.append(described(sequence))
    if copy is not None:
        plan.copies.append(copy)
        kept = min(kept, start // blocks.block_size)
    prompt = len(sequence.request.prompt_token_ids)
    if start < prompt:  # the rows behind this one may read its blocks
        end = min(start + num_tokens, prompt)
        blocks.index_blocks(table, sequence.token_ids, end, plan.step)
    sequence.num_sent = len(table.blocks)
    reaches_end = num_tokens == sequence.num_uncomputed and sequence.request.max_tokens > 0
    wanted = (1, sequence.num_forks) if reaches_end else (0, 0)
    new = tuple(table.blocks[kept:]) if kept < len(table.blocks) else ()
    return Row(sequence.seq_id, start, num_tokens, *wanted, kept, new)


def accept(sequence: Sequence, tokens: Sampled) -> bool:
    """Add accepted tokens, as many as there is room for; returns whether a sample failed."""
    room = end_of(sequence) - len(sequence.token_ids)
    accepted = [token for token in tokens[:room] if token is not None]
    sequence.token_ids += accepted
    return len(accepted) < len(tokens[:room])
