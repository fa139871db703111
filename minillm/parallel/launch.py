"""Starts the ranks of an engine: threads or processes of this machine, or of several machines.

torchrun starts the same program on every node. The one with RANK 0 is the driver, which starts rank
0 as a process of its own; the others serve as ranks. Ranks of several machines, and those on GPUs,
meet in a store (`meeting.py`).
"""

import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch

from minillm.api.arguments import EngineArgs
from minillm.errors import ConfigError, NodeError, UnsupportedFeatureError
from minillm.execution.executor import Executor
from minillm.models.checkpoint import ModelSource, weight_files
from minillm.parallel import device_groups, meeting, processes
from minillm.parallel.communicator import PATIENCE
from minillm.parallel.executor import RankThreads
from minillm.parallel.fingerprint import fingerprint
from minillm.parallel.groups import connect_ranks
from minillm.parallel.meeting import Address, connect
from minillm.parallel.messages import SetUp
from minillm.parallel.place import Topology, thread_places
from minillm.parallel.processes import RankProcesses
from minillm.parallel.rank import build_rank
from minillm.parallel.rank_process import Rank, start
from minillm.parallel.worker import serve_torchrun
from minillm.plan import machine
from minillm.plan.cost import MemoryPlan
from minillm.speculative.setup import DraftSource

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)
LOOK = 0.05  # seconds between checks of ranks that start


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
    if backend == "ray":
        from minillm.parallel.ray_ranks import open_ray

        return open_ray(set_up)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if backend == "external" else size
    if device_groups.backend_of(device) == "nccl":
        device_groups.check_gpus(device, here)
    if backend == "external":
        return open_torchrun(set_up, environment(here))
    return open_processes(set_up, environment(here))


def open_threads(set_up: SetUp) -> RankThreads:
    """Ranks that are threads of this process."""
    args, build = set_up.args, partial(build_rank, set_up)
    return RankThreads(thread_places(Topology.of(args), PATIENCE), build, args.step_interval)


def open_processes(set_up: SetUp, variables: Mapping[str, str]) -> RankProcesses:
    """Ranks that are processes of this machine."""
    if os.name != "posix":
        raise UnsupportedFeatureError(
            "Ranks that are processes need Linux or macOS; on this system use "
            "distributed_executor_backend='threads'."
        )
    every = range(set_up.args.num_ranks)
    if device_groups.backend_of(torch.device(set_up.device)):
        address, store = Address("127.0.0.1", 0, "minillm").open(hosts=True)
        own = {rank: partial(start, rank, (), variables) for rank in every}
        return open_nodes(set_up, address, store, own)
    for source in set_up.sources.values():
        weight_files(source)  # downloaded once, before the ranks read them
    opened, group = ExitStack(), group_of(set_up)
    try:
        fds = connect_ranks(Topology.of(set_up.args), opened)
        set_ups = [
            replace(set_up, rank=rank, group=group | {"rank": rank, "fds": fds[rank]})
            for rank in every
        ]
        return RankProcesses(
            set_ups, lambda rank: start(rank, [*fds[rank].values()], variables), opened.close
        )
    except BaseException:
        opened.close()
        raise


def group_of(set_up: SetUp) -> dict[str, Any]:
    """What all ranks know of their connections, as plain data."""
    patience = processes.CALL_PATIENCE * processes.STEP_PATIENCE
    return {"topology": asdict(Topology.of(set_up.args)), "patience": patience}


def open_torchrun(set_up: SetUp, variables: Mapping[str, str]) -> RankProcesses:
    """The ranks of torchrun. In those of a number above 0 this does not return."""
    address, size = meeting.torchrun_address(), set_up.args.num_ranks
    world, rank = (int(os.environ.get(name, "0")) for name in ("WORLD_SIZE", "RANK"))
    if world != size:
        raise ConfigError(
            f"torchrun has started {world} ranks, and the product of tensor_parallel_size, "
            f"pipeline_parallel_size and data_parallel_size is {size}; make them equal."
        )
    if rank:  # this program runs on all nodes, and its engine is that of the first
        serve_torchrun()
        sys.exit(0)
    address, store = address.open(hosts=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True")
    if store.add("engines", 1) > 1:
        raise ConfigError("The ranks of torchrun serve one engine; start another torchrun.")
    return open_nodes(set_up, address, store, {0: partial(start, 0, (), variables)})


def open_nodes(
    set_up: SetUp,
    address: Address,
    store: "Store",
    own: Mapping[int, Callable[[], Rank]] = {},
    look: Callable[[], None] = lambda: None,
    release: Callable[[], None] = lambda: None,
) -> RankProcesses:
    """The executor of ranks that meet in a store.

    Args:
        address: of the store.
        own: starts those that the driver starts, by their numbers.
        look: called regularly until all are there; raises if one cannot come.
        release: called when they have ended.
    """
    key, size = secrets.token_hex(32), set_up.args.num_ranks
    store.set("key", key)
    group = group_of(set_up) | {
        "store": address,
        "backend": device_groups.backend_of(torch.device(set_up.device)),
        "device": set_up.device,
        "ordered": set_up.args.deterministic,
    }
    prints = fingerprint(set_up.sources, set_up.args.load_format)
    others: dict[int, tuple[Connection, str]] = {}
    kept = [store]  # where this process hosts it, until the ranks have ended

    def end() -> None:
        kept.clear()
        release()

    try:
        for rank in range(size):
            if rank not in own:
                others[rank] = reached(store, key.encode(), rank, size, look)

        def spawn(rank: int) -> Rank:
            if rank in own:
                return own[rank]()
            link, node = others[rank]
            return Rank(rank, None, link, node=node)

        set_ups = [
            replace(set_up, rank=rank, group=group | {"rank": rank}, fingerprint=prints)
            for rank in range(size)
        ]
        return RankProcesses(set_ups, spawn, end)
    except BaseException:
        for link, _ in others.values():
            link.close()
        raise


def reached(
    store: "Store", key: bytes, rank: int, size: int, look: Callable[[], None]
) -> tuple[Connection, str]:
    """The connection to a rank and the name of its node, once it is there. Raises NodeError."""
    end = monotonic() + meeting.PATIENCE
    while not store.check([f"rank {rank}"]):
        look()
        if monotonic() > end:
            raise NodeError(
                f"Rank {rank} of {size} did not start in {meeting.PATIENCE:g} s; see that the same "
                "command runs on all nodes, and that they reach each other."
            )
        sleep(LOOK)
    node = json.loads(store.get(f"rank {rank}"))["node"]
    return Connection(connect(store, key, meeting.DRIVER, rank).detach()), node


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
