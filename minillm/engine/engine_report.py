"""What a trace of an engine is a trace of."""

import torch

from minillm.scheduling.data_parallel import DataParallelScheduler, schedulers_of
from minillm.scheduling.scheduler import Scheduler
from minillm.trace.recorder import TraceSettings


def trace_settings(
    name: str, dtype: str, device: torch.device, scheduler: Scheduler | DataParallelScheduler
) -> TraceSettings:
    """What engine is recorded."""
    config, blocks, copies = scheduler.config, scheduler.blocks, len(schedulers_of(scheduler))
    return TraceSettings(
        model=name,
        dtype=dtype,
        device=str(device),
        policy=config.policy,
        admission=config.admission,
        preemption=config.preemption_mode,
        prefix_cache=blocks.prefix_cache,
        block_size=blocks.block_size,
        num_blocks=copies * blocks.pool.num_blocks,
        num_host_blocks=copies * blocks.host.num_blocks,
        max_num_seqs=copies * config.max_num_seqs,
        max_num_batched_tokens=copies * config.max_num_batched_tokens,
    )
