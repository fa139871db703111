"""Ranks on several machines, as the driver sees them: they connect, and then serve as others do."""

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

import torch

from minillm.api.engine_args import EngineArgs
from minillm.errors import ConfigError, NodeError, UnsupportedFeatureError
from minillm.execution.executor import Executor
from minillm.models.checkpoint import ModelSource, weight_files
from minillm.parallel import processes
from minillm.parallel.fingerprint import fingerprint
from minillm.parallel.handshake import read_secret
from minillm.parallel.listener import Arrival, Listener
from minillm.parallel.meeting import NodeGroups
from minillm.parallel.messages import SetUp
from minillm.parallel.processes import RankProcesses
from minillm.parallel.rank_process import Elsewhere, Rank
from minillm.plan.cost import MemoryPlan
from minillm.speculative.setup import DraftSource

logger = logging.getLogger(__name__)
PATIENCE = 600.0  # seconds in which all ranks connect
LOOK = 0.2  # seconds between two looks at those who start them
TORCHRUN_KEY = "minillm/address"


def open_nodes(
    args: EngineArgs,
    source: ModelSource,
    plan: MemoryPlan,
    device: torch.device,
    draft: DraftSource | None,
) -> Executor:
    """Ranks that others start: `minillm node`, torchrun."""
    check_device(device)
    check_torchrun(args.num_ranks)
    secret = read_secret()
    listener = Listener(args.master_addr, args.master_port, secret)
    try:
        where = f"{listener.address[0]}:{listener.address[1]}"
        is_known = args.master_port or torchrun_store() is not None
        level = logging.INFO if is_known else logging.WARNING
        text = "Waiting for %d ranks at %s; start each with `minillm node --connect %s`."
        logger.log(level, text, args.num_ranks, where, where)
        publish(where)
        ranks, addresses = gather(listener, args.num_ranks)
    finally:
        listener.close()
    return serve(ranks, addresses, args, source, plan, device, draft)


def check_device(device: torch.device) -> None:
    """UnsupportedFeatureError for another one than the CPU."""
    if device.type != "cpu":
        raise UnsupportedFeatureError(
            f"Ranks on other machines compute on the CPU in this version, not on {device}; use "
            "device='cpu'."
        )


def serve(
    ranks: list[Rank],
    addresses: list[Any],
    args: EngineArgs,
    source: ModelSource,
    plan: MemoryPlan,
    device: torch.device,
    draft: DraftSource | None,
    release: Callable[[], None] = lambda: None,
) -> RankProcesses:
    """The executor of ranks that have arrived; `release` is called when they have ended."""
    level, patience = logging.getLogger("minillm").getEffectiveLevel(), processes.STEP_PATIENCE
    sizes = args.tensor_parallel_size, args.pipeline_parallel_size
    copies = args.data_parallel_size, args.enable_expert_parallel
    group = NodeGroups(addresses, *sizes, 0.8 * patience, *copies)
    group.release = release
    models = {"model": source} | ({"draft": draft.source} if draft else {})
    try:
        for each in models.values():
            weight_files(each)
        found = {name: fingerprint(each, args.load_format) for name, each in models.items()}
        prints = found | {"node": socket.gethostname()}
        set_ups = [
            SetUp(n, len(ranks), args, source, plan, str(device), draft, group.of(n), level, prints)
            for n in range(len(ranks))
        ]
        return RankProcesses(set_ups, group, {}, patience, ranks)
    except BaseException:
        for rank in ranks:
            rank.connection.close()
        raise


def gather(
    listener: Listener, size: int, look: Callable[[], None] = lambda: None
) -> tuple[list[Rank], list[Any]]:
    """All ranks, and where each of them listens. `look` raises if one of them cannot come.

    Ranks that say no number get the next one, node by node.

    Raises:
        NodeError: they did not arrive, or two have the same number.
    """
    arrived: list[Arrival] = []
    end = monotonic() + PATIENCE
    try:
        while len(arrived) < size:
            look()
            if (found := listener.next(min(LOOK, end - monotonic()))) is not None:
                arrived.append(found)
                name, count = found.hello.get("node"), len(arrived)
                logger.info("%d of %d ranks have arrived, the last from %s", count, size, name)
            elif monotonic() > end:
                raise NodeError(too_few(listener, arrived, size))
        arrived = in_order(arrived)
    except BaseException:
        for each in arrived:
            each.connection.close()
        raise
    ranks = [
        Rank(n, Elsewhere(each.connection), each.connection, None, node=str(each.hello["node"]))
        for n, each in enumerate(arrived)
    ]
    return ranks, [each.hello["address"] for each in arrived]


def too_few(listener: Listener, arrived: list[Arrival], size: int) -> str:
    """A sentence on which ranks are there."""
    names = ", ".join(str(each.hello.get("node")) for each in arrived)
    host, port = listener.address
    return (
        f"{len(arrived)} of {size} ranks connected to {host}:{port} in {PATIENCE:g} s"
        f"{' (from ' + names + ')' if names else ''}; run `minillm node --connect {host}:{port}` "
        "for each of the others, and see that its node reaches this one."
    )


def in_order(arrived: list[Arrival]) -> list[Arrival]:
    """By the numbers that ranks say; else those of a node together."""
    numbers = [each.hello.get("rank") for each in arrived]
    if all(each is None for each in numbers):
        nodes = [each.hello.get("node") for each in arrived]
        return sorted(arrived, key=lambda each: nodes.index(each.hello.get("node")))
    if sorted(map(str, numbers)) != sorted(map(str, range(len(arrived)))):
        raise NodeError(
            f"{len(arrived)} ranks say that they are number {', '.join(map(str, numbers))}; give "
            f"each of the numbers from 0 to {len(arrived) - 1} to one of them, or none at all."
        )
    return sorted(arrived, key=lambda each: int(each.hello["rank"]))


# ---- torchrun ----------------------------------------------------------------------------------


def torchrun_store() -> Any:
    """That of torchrun on its first node, or None outside of torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from datetime import timedelta

    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=PATIENCE))


def check_torchrun(size: int) -> None:
    """ConfigError if torchrun has started another number of ranks than the engine needs."""
    world = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    if world is not None and int(world) != size:
        raise ConfigError(
            f"torchrun has started {world} ranks, and the product of tensor_parallel_size, "
            f"pipeline_parallel_size and data_parallel_size is {size}; make them equal."
        )


def publish(where: str) -> None:
    """Tell the ranks of torchrun where the driver listens. They trust nobody for that: the
    handshake follows."""
    with suppress(RuntimeError):
        if (store := torchrun_store()) is not None:
            store.set(TORCHRUN_KEY, where)


def published() -> str:
    """Where the driver listens, once it does.

    Raises NodeError outside of torchrun, or if no driver starts.
    """
    try:
        store = torchrun_store()
        if store is not None:
            return str(store.get(TORCHRUN_KEY).decode())
    except RuntimeError:
        raise NodeError(
            f"No driver said in {PATIENCE:g} s where it listens; see what the first node of "
            "torchrun reports."
        ) from None
    raise NodeError("This is no rank of torchrun; say where the driver is with --connect.")
