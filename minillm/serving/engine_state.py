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
    """

    num_running: int
    num_waiting: int
    max_num_seqs: int
    kv_cache_usage: float
    counters: Counters
    memory: MemoryPlan

    @classmethod
    def of(cls, engine: Engine, num_unfinished: int = 0) -> "EngineState":
        """The state of an engine with `num_unfinished` requests."""
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
        )
