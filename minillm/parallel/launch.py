"""Starts the ranks of an engine: threads or processes of this machine, nodes, or Ray actors."""

import logging
import os
from dataclasses import replace

import torch

from minillm.api.arguments import EngineArgs
from minillm.errors import UnsupportedFeatureError
from minillm.execution.executor import Executor
from minillm.models.checkpoint import ModelSource, weight_files
from minillm.parallel import device_groups, processes
from minillm.parallel.communicator import PATIENCE
from minillm.parallel.executor import RankThreads
from minillm.parallel.groups import Groups
from minillm.parallel.messages import SetUp
from minillm.parallel.nodes import open_gpus, open_torchrun
from minillm.parallel.place import Topology, thread_places
from minillm.parallel.processes import RankProcesses
from minillm.parallel.rank import build_rank
from minillm.parallel.rank_process import Rank, start
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
    """The ranks of an engine, each with the blocks of the plan."""
    level = logging.getLogger("minillm").getEffectiveLevel()
    set_up = SetUp(0, args, source, plan, str(device), draft, {}, level)
    backend, size = args.distributed_executor_backend, args.num_ranks
    if backend == "threads":
        return open_threads(set_up)
    groups = device_groups.backend_of(device)
    if backend == "ray":
        from minillm.parallel.ray_ranks import open_ray

        return open_ray(set_up)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if backend == "external" else size
    if groups == "nccl":
        device_groups.check_gpus(device, here)
    if backend == "external":
        return open_torchrun(set_up, environment(here))
    return open_gpus(set_up, environment(here)) if groups else open_processes(set_up)


def open_threads(set_up: SetUp) -> RankThreads:
    """Ranks that are threads of this process."""
    args, topology = set_up.args, Topology.of(set_up.args)
    copies = topology.num_copies, topology.share_experts
    places = thread_places(topology.size, topology.num_stages, PATIENCE, *copies)
    return RankThreads(places, lambda place: build_rank(set_up, place), args.step_interval)


def open_processes(set_up: SetUp) -> RankProcesses:
    """Ranks that are processes of this machine."""
    if os.name != "posix":
        raise UnsupportedFeatureError(
            "Ranks that are processes need Linux or macOS; on this system use "
            "distributed_executor_backend='threads'."
        )
    for each in set_up.sources.values():
        weight_files(each)  # downloaded once, before the ranks read them
    topology = Topology.of(set_up.args)
    group = Groups(topology, processes.CALL_PATIENCE * processes.STEP_PATIENCE)
    try:
        variables = environment(topology.num_ranks)

        def spawn(rank: int) -> Rank:
            return start(rank, group.fds_of(rank), variables)

        every = range(topology.num_ranks)
        set_ups = [replace(set_up, rank=rank, group=group.of(rank)) for rank in every]
        return RankProcesses(set_ups, spawn, group.close)
    except BaseException:
        group.close()
        raise


def environment(size: int) -> dict[str, str]:
    """That of each rank: this process's, and an equal share of the processors as OMP_NUM_THREADS
    unless it is set."""
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
