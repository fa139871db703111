"""Starting ranks: threads of this process, or processes of their own."""

import torch

from minillm.cost import MemoryPlan
from minillm.engine_args import EngineArgs
from minillm.errors import UnsupportedFeatureError
from minillm.executor import Executor
from minillm.models.checkpoint import ModelSource
from minillm.parallel.executor import RankThreads
from minillm.parallel.place import Place, thread_places
from minillm.parallel.rank import build_rank
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

        def build(place: Place) -> Runner:
            return build_rank(args, source, plan, device, place, draft)

        sizes = args.tensor_parallel_size, args.pipeline_parallel_size
        return RankThreads(thread_places(*sizes), build)
    raise UnsupportedFeatureError(
        "Processes are not built yet; use distributed_executor_backend='threads'."
    )
