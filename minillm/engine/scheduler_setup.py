"""The scheduler that engine arguments ask for."""

from minillm.cache.manager import BlockManager
from minillm.api.engine_args import EngineArgs
from minillm.execution.executor import Capacity
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.data_parallel import DataParallelScheduler
from minillm.scheduling.scheduler import Scheduler
from minillm.speculative.setup import DraftSource, build_drafts, speculation_of

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2048


def scheduler_config(args: EngineArgs) -> SchedulerConfig:
    """The scheduler's part of the arguments; ConfigError where they contradict each other."""
    budget = args.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs or min(MAX_NUM_SEQS, budget),
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        enable_chunked_prefill=args.enable_chunked_prefill,
        policy=args.scheduling_policy,
        admission=args.admission_policy,
        preemption_mode="swap" if args.swap_space else "recompute",
        num_stages=args.pipeline_parallel_size,
    )


def build_scheduler(
    args: EngineArgs, capacity: Capacity, draft: DraftSource | None = None
) -> Scheduler | DataParallelScheduler:
    """The scheduler over the blocks that an executor has: those of each copy of the model."""
    copies = [one_scheduler(args, capacity, draft) for _ in range(args.data_parallel_size)]
    return DataParallelScheduler(copies) if len(copies) > 1 else copies[0]


def one_scheduler(args: EngineArgs, capacity: Capacity, draft: DraftSource | None) -> Scheduler:
    """The scheduler of one copy of the model."""
    prefix_cache = None if args.enable_prefix_caching is False else args.prefix_cache or "hash"
    blocks = BlockManager(
        capacity.num_blocks, capacity.block_size, prefix_cache, capacity.num_host_blocks
    )
    speculation = speculation_of(args)
    drafts = None if speculation is None else build_drafts(speculation, draft)
    return Scheduler(scheduler_config(args), blocks, drafts=drafts)
