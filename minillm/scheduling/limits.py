"""Rejects requests that do not fit even on an idle engine."""

from minillm.cache.manager import BlockManager
from minillm.errors import InvalidRequestError
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.policies import ADMISSIONS
from minillm.scheduling.request import Request, Sequence


def check_fits(request: Request, config: SchedulerConfig, blocks: BlockManager) -> None:
    """Check that the request fits if it runs alone.

    Raises:
        InvalidRequestError: it does not; the message says what it needs and what there is.
    """
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
