"""Ranks on several machines: they meet through a store (`meeting.py`), and then serve as others do.

torchrun starts the same program on every node. The one with RANK 0 is the driver, which starts rank
0 as a process of its own; the others are ranks (`serve_torchrun`). Ray starts actors.
"""

import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Connection
from threading import Event, Thread
from time import monotonic, sleep
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from minillm.errors import ConfigError, NodeError
from minillm.models.checkpoint import weight_files
from minillm.parallel import device_groups, meeting, processes
from minillm.parallel.fingerprint import fingerprint
from minillm.parallel.groups import join
from minillm.parallel.meeting import Address, Meeting, check_versions, connect, hello
from minillm.parallel.messages import Channel, SetUp
from minillm.parallel.place import Topology
from minillm.parallel.processes import RankProcesses
from minillm.parallel.rank_process import Elsewhere, Rank, hang_up, start
from minillm.parallel.worker import serve, wait_for_end

if TYPE_CHECKING:
    from torch.distributed import Store

LOOK = 0.05  # seconds between checks of the ranks that start


# ---- the driver --------------------------------------------------------------------------------


def open_gpus(set_up: SetUp, environment: dict[str, str]) -> RankProcesses:
    """Processes of this machine whose groups meet in a store: one for each GPU."""
    address, store = Address("127.0.0.1", 0, "minillm").open(hosts=True)
    every = range(set_up.args.num_ranks)
    own = {rank: partial(start, rank, (), environment) for rank in every}
    return open_nodes(set_up, address, store, own)


def open_torchrun(set_up: SetUp, environment: dict[str, str]) -> RankProcesses:
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
    return open_nodes(set_up, address, store, {0: partial(start, 0, (), environment)})


def open_nodes(
    set_up: SetUp,
    address: Address,
    store: "Store",
    own: Mapping[int, Callable[[], Rank]] = MappingProxyType({}),
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
    group = {
        "topology": asdict(Topology.of(set_up.args)),
        "patience": processes.CALL_PATIENCE * processes.STEP_PATIENCE,
        "store": address,
        "backend": device_groups.backend_of(torch.device(set_up.device)),
        "device": set_up.device,
        "ordered": set_up.args.deterministic,
    }
    prints: dict[str, Any] = {"node": socket.gethostname()}
    for name, source in set_up.sources.items():
        weight_files(source)
        prints[name] = fingerprint(source, set_up.args.load_format)
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
            return Rank(rank, Elsewhere(link), link, None, node=node)

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
    """The connection to a rank and the name of its node, once it is there.

    Raises:
        NodeError: it does not come in time, or has other versions.
    """
    end = monotonic() + meeting.PATIENCE
    while not store.check([f"rank {rank}"]):
        look()
        if monotonic() > end:
            raise NodeError(
                f"Rank {rank} of {size} did not start in {meeting.PATIENCE:g} s; see that the same "
                "command runs on all nodes, and that they reach each other."
            )
        sleep(LOOK)
    theirs = json.loads(store.get(f"rank {rank}"))
    check_versions(theirs, hello())
    link = connect(store, key, meeting.DRIVER, rank)
    return Connection(link.detach()), str(theirs["node"])


# ---- a rank ------------------------------------------------------------------------------------


def serve_torchrun() -> None:
    """Serve one engine as the rank that torchrun has started, until its driver closes it."""
    signals = signal.SIGINT, signal.SIGTERM  # torchrun sends them to all: the driver decides
    serve_rank(meeting.torchrun_address(), int(os.environ["RANK"]), signals)


def serve_rank(address: Address, rank: int, ignored: Sequence[signal.Signals] = ()) -> None:
    """Serve one engine as a rank, until its driver closes it.

    Args:
        address: of the store.
        rank: its number.
        ignored: signals that no longer end this process once the driver has connected.

    Raises:
        NodeError: the driver does not come, or has ended.
        MinillmError: any other failure of the rank, which the driver reports, too.
    """
    met = Meeting(address, rank)
    try:
        with Connection(met.link(meeting.DRIVER).detach()) as connection:
            for each in ignored:
                signal.signal(each, signal.SIG_IGN)
            done = Event()
            Thread(target=watch, args=(connection, done), daemon=True).start()
            error = serve(Channel(connection), partial(join, met=met))
            done.set()
            hang_up(connection)  # `watch` still holds it
    finally:
        met.close()
    if isinstance(error, StopIteration | ConnectionError):
        raise NodeError("The driver has ended; its own message says why.")
    if error is not None:
        raise error


def watch(connection: Connection, done: Event) -> None:
    """End this process when the driver has ended, also in the middle of a step."""
    with suppress(OSError, ValueError):  # closed here
        wait_for_end(connection)
        if done.is_set():
            return
        with suppress(OSError):
            sys.stderr.write("error: The driver has ended, and so this rank.\n")
            sys.stderr.flush()
        os._exit(1)
