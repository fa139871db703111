"""Logs the statistics of an asynchronous engine, unless `disable_log_stats`."""

import logging
from dataclasses import replace
from time import perf_counter

from minillm.engine.loop import Engine
from minillm.scheduling.acceptance import Acceptance
from minillm.scheduling.record import Counters
from minillm.serving.engine_state import EngineState

logger = logging.getLogger(__name__)

INTERVAL = 10.0  # seconds between two lines


class StatLogger:
    """Logs a line of level INFO every `INTERVAL` seconds while steps run, and vLLM's line about
    speculative decoding if tokens were drafted."""

    def __init__(self, counters: Counters):
        self._since = perf_counter()
        self._before, self._accepted = replace(counters), Acceptance.of(counters)

    def after_step(self, engine: Engine) -> None:
        """Log the statistics since the last line if `INTERVAL` seconds have passed."""
        now = perf_counter()
        seconds = now - self._since
        if seconds < INTERVAL:
            return
        state = EngineState.of(engine)
        after, before = state.counters, self._before
        total = Acceptance.of(after)
        drafts = total.since(self._accepted)
        self._since, self._before, self._accepted = now, after, total
        num_prompt = after.num_prompt_tokens - before.num_prompt_tokens
        num_cached = after.num_cached_tokens - before.num_cached_tokens
        num_new = after.num_decode_tokens - before.num_decode_tokens + drafts.num_accepted_tokens
        logger.info(
            "%d sequences running, %d waiting; %.0f prompt and %.0f new tokens/s; %.1f%% of the KV "
            "cache in use; %.1f%% of the prompt tokens were cached; %d preemptions",
            state.num_running,
            state.num_waiting,
            (after.num_prefill_tokens - before.num_prefill_tokens) / seconds,
            num_new / seconds,
            100 * state.kv_cache_usage,
            100 * num_cached / max(num_prompt, 1),
            num_preemptions(after) - num_preemptions(before),
        )
        if drafts.num_drafts:
            log_drafts(drafts, seconds)


def log_drafts(drafts: Acceptance, seconds: float) -> None:
    """vLLM's line about speculative decoding."""
    logger.info(
        "SpecDecoding metrics: Mean acceptance length: %.2f, Accepted throughput: %.2f tokens/s, "
        "Drafted throughput: %.2f tokens/s, Accepted: %d tokens, Drafted: %d tokens, "
        "Per-position acceptance rate: %s, Avg Draft acceptance rate: %.1f%%",
        drafts.mean_length,
        drafts.num_accepted_tokens / seconds,
        drafts.num_draft_tokens / seconds,
        drafts.num_accepted_tokens,
        drafts.num_draft_tokens,
        ", ".join(f"{rate:.3f}" for rate in drafts.rates_at),
        100 * (drafts.rate or 0),
    )


def num_preemptions(counters: Counters) -> int:
    """Preemptions of both kinds."""
    return counters.num_preemptions_recompute + counters.num_preemptions_swap
