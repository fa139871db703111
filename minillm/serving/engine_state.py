"""A snapshot of an engine's load and counters, for reports of the server."""

from dataclasses import dataclass, replace

from minillm.engine.loop import Engine
from minillm.plan.cost import MemoryPlan
from minillm.scheduling.data_parallel import schedulers_of
from minillm.scheduling.record import Counters


@dataclass(frozen=True)
class EngineState:
    """Numbers of an engine at one time. They are read while steps run, so they may be of two
    consecutive steps.

    Attributes:
        num_running: sequences in the running batch.
        num_waiting: sequences in the scheduler's queue, and requests outside of the engine.
        max_num_seqs: maximum of `num_running`.
        kv_cache_usage: share of the KV cache's blocks in use, 0 to 1.
        num_generated: new tokens since the start.
        waiting_reason: what the first waiting sequence lacks: "batch_slots", "tokens" or
            "blocks"; "next_step" if no step has refused it.
    """

    num_running: int
    num_waiting: int
    max_num_seqs: int
    kv_cache_usage: float
    counters: Counters
    memory: MemoryPlan
    num_generated: int = 0
    waiting_reason: str = "next_step"

    @classmethod
    def of(cls, engine: Engine, num_unfinished: int = 0, num_generated: int = 0) -> "EngineState":
        """The state of an engine with `num_unfinished` requests."""
        blocked = engine.trace[-1].blocked if engine.trace else None
        scheduler = engine.scheduler
        each = schedulers_of(scheduler)
        num_blocks = sum(one.blocks.pool.num_blocks for one in each)
        num_free = sum(one.blocks.pool.num_free for one in each)
        num_running, num_inside = len(scheduler.running), len(scheduler.waiting)
        return cls(
            num_running=num_running,
            num_waiting=max(num_inside, num_unfinished - num_running),
            max_num_seqs=sum(one.config.max_num_seqs for one in each),
            kv_cache_usage=1 - num_free / num_blocks,
            counters=replace(scheduler.counters),
            memory=engine.memory,
            num_generated=num_generated,
            waiting_reason=blocked.what.replace(" ", "_") if blocked else "next_step",
        )
