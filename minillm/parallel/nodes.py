"""Ranks on several machines, on the driver's side: they connect, and then serve as others do."""

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from secrets import token_hex
from time import monotonic
from typing import Any

from minillm.errors import ConfigError, NodeError
from minillm.models.checkpoint import weight_files
from minillm.parallel import processes
from minillm.parallel.fingerprint import fingerprint
from minillm.parallel.handshake import Arrival, Listener, read_secret
from minillm.parallel.messages import SetUp
from minillm.parallel.place import Topology
from minillm.parallel.processes import RankProcesses
from minillm.parallel.rank_process import Elsewhere, Rank

logger = logging.getLogger(__name__)
PATIENCE = 600.0  # seconds in which all ranks connect
LOOK = 0.2  # seconds between checks of the ranks' launcher
TORCHRUN_KEY = "minillm/address"


def open_nodes(set_up: SetUp) -> RankProcesses:
    """Ranks that are started by `minillm node` or torchrun."""
    args = set_up.args
    check_torchrun(args.num_ranks)
    listener = Listener(args.master_addr, args.master_port, read_secret())
    try:
        where = f"{listener.address[0]}:{listener.address[1]}"
        is_known = args.master_port or torchrun_store() is not None
        level = logging.INFO if is_known else logging.WARNING
        text = "Waiting for %d ranks at %s; start each with `minillm node --connect %s`."
        logger.log(level, text, args.num_ranks, where, where)
        publish(where)
        arrived = gather(listener, args.num_ranks)
    finally:
        listener.close()
    return serve(set_up, arrived)


def serve(
    set_up: SetUp, arrived: list[Arrival], release: Callable[[], None] = lambda: None
) -> RankProcesses:
    """The executor of ranks that have connected; `release` is called when they have ended."""
    group = {
        "topology": asdict(Topology.of(set_up.args)),
        "patience": processes.CALL_PATIENCE * processes.STEP_PATIENCE,
        "engine": token_hex(8),  # keeps the ranks of two engines apart
        "addresses": [each.hello["address"] for each in arrived],
    }

    def spawn(rank: int) -> Rank:
        link, node = arrived[rank].connection, str(arrived[rank].hello["node"])
        return Rank(rank, Elsewhere(link), link, None, node=node)

    try:
        prints: dict[str, Any] = {"node": socket.gethostname()}
        for name, source in set_up.sources.items():
            weight_files(source)
            prints[name] = fingerprint(source, set_up.args.load_format)
        set_ups = [
            replace(set_up, rank=rank, group=group | {"rank": rank}, fingerprint=prints)
            for rank in range(len(arrived))
        ]
        return RankProcesses(set_ups, spawn, release)
    except BaseException:
        for each in arrived:
            each.connection.close()
        raise


def gather(listener: Listener, size: int, look: Callable[[], None] = lambda: None) -> list[Arrival]:
    """All ranks in their order. `look` is called regularly, and raises if a rank cannot come.

    Raises:
        NodeError: ranks did not connect in time, or two have the same number.
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
        return in_order(arrived)
    except BaseException:
        for each in arrived:
            each.connection.close()
        raise


def too_few(listener: Listener, arrived: list[Arrival], size: int) -> str:
    """The message for ranks that did not connect."""
    names = ", ".join(str(each.hello.get("node")) for each in arrived)
    host, port = listener.address
    return (
        f"{len(arrived)} of {size} ranks connected to {host}:{port} in {PATIENCE:g} s"
        f"{' (from ' + names + ')' if names else ''}; run `minillm node --connect {host}:{port}` "
        "for each of the others, and see that its node reaches this one."
    )


def in_order(arrived: list[Arrival]) -> list[Arrival]:
    """By the numbers that ranks give; without numbers, node by node."""
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
    """The store of torchrun on its first node; None outside of torchrun."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
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
    """Tell the ranks of torchrun the driver's address. The store is not trusted: the handshake
    authenticates both ends."""
    with suppress(RuntimeError):
        if (store := torchrun_store()) is not None:
            store.set(TORCHRUN_KEY, where)


def published() -> str:
    """The driver's address, once it is known.

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
