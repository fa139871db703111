"""What a server logs about its engine while it serves, unless `disable_log_stats`."""

import logging
from dataclasses import replace
from time import perf_counter

from minillm.scheduling.record import Counters
from minillm.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

INTERVAL = 10.0  # seconds between two lines


class StatLogger:
    """One line of level INFO every `INTERVAL` seconds in which steps run."""

    def __init__(self, counters: Counters):
        self._since, self._before = perf_counter(), replace(counters)

    def after_step(self, scheduler: Scheduler) -> None:
        """Log what was done since the last line, if it is time for the next one."""
        now = perf_counter()
        seconds = now - self._since
        if seconds < INTERVAL:
            return
        after, before, pool = scheduler.counters, self._before, scheduler.blocks.pool
        self._since, self._before = now, replace(after)
        num_prompt = after.num_prompt_tokens - before.num_prompt_tokens
        num_cached = after.num_cached_tokens - before.num_cached_tokens
        logger.info(
            "%d sequences running, %d waiting; %.0f prompt and %.0f new tokens/s; %.1f%% of the KV "
            "cache in use; %.1f%% of the prompt tokens were cached; %d preemptions",
            len(scheduler.running),
            len(scheduler.waiting),
            (after.num_prefill_tokens - before.num_prefill_tokens) / seconds,
            (after.num_decode_tokens - before.num_decode_tokens) / seconds,
            100 * (1 - pool.num_free / pool.num_blocks),
            100 * num_cached / max(num_prompt, 1),
            num_preemptions(after) - num_preemptions(before),
        )


def num_preemptions(counters: Counters) -> int:
    """Of both kinds."""
    return counters.num_preemptions_recompute + counters.num_preemptions_swap
