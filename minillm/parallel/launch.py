"""Starting ranks: threads of this process, or processes of their own."""

import logging
import os

import torch

from minillm.api.engine_args import EngineArgs
from minillm.errors import UnsupportedFeatureError
from minillm.execution.executor import Executor
from minillm.execution.runner import Runner
from minillm.models.checkpoint import ModelSource, weight_files
from minillm.parallel import processes
from minillm.parallel.executor import RankThreads
from minillm.parallel.groups import Groups
from minillm.parallel.messages import SetUp
from minillm.parallel.place import Place, thread_places
from minillm.parallel.processes import RankProcesses
from minillm.parallel.rank import build_rank
from minillm.parallel.threads import PATIENCE
from minillm.plan import machine
from minillm.plan.cost import MemoryPlan
from minillm.speculative.setup import DraftSource

logger = logging.getLogger(__name__)


def open_ranks(
    args: EngineArgs,
    source: ModelSource,
    plan: MemoryPlan,
    device: torch.device,
    draft: DraftSource | None,
) -> Executor:
    """The ranks of an engine, each over the blocks of the plan."""
    parts = args, source, plan, device, draft
    if args.distributed_executor_backend == "threads":
        return open_threads(*parts)
    if args.distributed_executor_backend == "external":
        from minillm.parallel.nodes import open_nodes

        return open_nodes(*parts)
    if args.distributed_executor_backend == "ray":
        from minillm.parallel.ray_ranks import open_ray

        return open_ray(*parts)
    return open_processes(*parts)


def open_threads(
    args: EngineArgs,
    source: ModelSource,
    plan: MemoryPlan,
    device: torch.device,
    draft: DraftSource | None,
) -> Executor:
    """Ranks that are threads of this process."""

    def build(place: Place) -> Runner:
        return build_rank(args, source, plan, device, place, draft)

    sizes = args.tensor_parallel_size, args.pipeline_parallel_size
    copies = args.data_parallel_size, args.enable_expert_parallel
    places = thread_places(*sizes, PATIENCE, *copies)
    return RankThreads(places, build, args.step_interval)


def open_processes(
    args: EngineArgs,
    source: ModelSource,
    plan: MemoryPlan,
    device: torch.device,
    draft: DraftSource | None,
) -> Executor:
    """Ranks that are processes of this machine."""
    if os.name != "posix":
        raise UnsupportedFeatureError(
            "Ranks that are processes need Linux or macOS; on this system use "
            "distributed_executor_backend='threads'."
        )
    if device.type != "cpu":
        raise UnsupportedFeatureError(
            f"Ranks that are processes compute on the CPU in this version, not on {device}; use "
            "device='cpu'."
        )
    for each in (source, draft.source if draft else source):
        weight_files(each)  # fetched once, and not by every rank
    sizes = args.tensor_parallel_size, args.pipeline_parallel_size
    size, level = args.num_ranks, logging.getLogger("minillm").getEffectiveLevel()
    patience = processes.STEP_PATIENCE
    # The driver waits longer than the ranks for each other: these say which of them is missing.
    copies = args.data_parallel_size, args.enable_expert_parallel
    group = Groups(*sizes, 0.8 * patience, *copies)
    try:
        set_ups = [
            SetUp(rank, size, args, source, plan, str(device), draft, group.of(rank), level)
            for rank in range(size)
        ]
        return RankProcesses(set_ups, group, environment(size), patience)
    except BaseException:
        group.close()
        raise


def environment(size: int) -> dict[str, str]:
    """Of each rank: this process's, with an equal share of the processors, unless the user has set
    a number of threads."""
    processors = machine.cpu_count()
    if size > processors:
        logger.warning(
            "%d ranks share %d processor%s, so each step takes about %.1f times as long as with a "
            "processor for each; use fewer ranks.",
            size,
            processors,
            "s" * (processors > 1),
            size / processors,
        )
    return {"OMP_NUM_THREADS": str(max(processors // size, 1)), **os.environ}
