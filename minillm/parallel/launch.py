"""Starting ranks: threads of this process, or processes of their own."""

import torch

from minillm.cost import MemoryPlan
from minillm.engine_args import EngineArgs
from minillm.errors import UnsupportedFeatureError
from minillm.executor import Executor
from minillm.models.checkpoint import ModelSource
from minillm.parallel.communicator import Communicator
from minillm.parallel.executor import RankThreads
from minillm.parallel.rank import build_rank
from minillm.parallel.threads import ThreadGroup
from minillm.runner import Runner
from minillm.speculative.setup import DraftSource


def open_ranks(
    args: EngineArgs,
    source: ModelSource,
    plan: MemoryPlan,
    device: torch.device,
    draft: DraftSource | None,
) -> Executor:
    """The ranks of an engine, each over the blocks of the plan."""
    if args.distributed_executor_backend == "threads":

        def build(communicator: Communicator) -> Runner:
            return build_rank(args, source, plan, device, communicator, draft)

        return RankThreads(ThreadGroup(args.tensor_parallel_size).communicators(), build)
    raise UnsupportedFeatureError(
        "Processes are not built yet; use distributed_executor_backend='threads'."
    )
