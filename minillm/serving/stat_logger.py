"""Logs the statistics of an asynchronous engine, unless `disable_log_stats`."""

import logging
from time import perf_counter

from minillm.engine.loop import Engine
from minillm.scheduling.record import Counters
from minillm.serving.engine_state import EngineState

logger = logging.getLogger(__name__)

INTERVAL = 10.0  # seconds between two lines


class StatLogger:
    """Logs a line of level INFO every `INTERVAL` seconds while steps run, and vLLM's line about
    speculative decoding if tokens were drafted."""

    def __init__(self, counters: Counters):
        self._since = perf_counter()
        self._before = Counters().plus(counters)

    def after_step(self, engine: Engine) -> None:
        """Log the statistics since the last line if `INTERVAL` seconds have passed."""
        now = perf_counter()
        seconds = now - self._since
        if seconds < INTERVAL:
            return
        state = EngineState.of(engine)
        new = state.counters.since(self._before)
        self._since, self._before = now, self._before.plus(new)
        logger.info(
            "%d sequences running, %d waiting; %.0f prompt and %.0f new tokens/s; %.1f%% of the KV "
            "cache in use; %.1f%% of the prompt tokens were cached; %d preemptions",
            state.num_running,
            state.num_waiting,
            new.num_prefill_tokens / seconds,
            (new.num_decode_tokens + new.num_accepted_tokens) / seconds,
            100 * state.kv_cache_usage,
            100 * new.num_cached_tokens / max(new.num_prompt_tokens, 1),
            new.num_preemptions_recompute + new.num_preemptions_swap,
        )
        if new.num_drafts:
            log_drafts(new, seconds)


def log_drafts(drafts: Counters, seconds: float) -> None:
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
