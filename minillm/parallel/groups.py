"""Connections of ranks that are processes of one machine: the driver opens them, and each rank
inherits the descriptors of its own."""

from contextlib import ExitStack, closing
from itertools import combinations
from socket import socket, socketpair
from typing import Any

from minillm.parallel.communicator import Communicator
from minillm.parallel.meeting import Address, Meeting
from minillm.parallel.pipes import SocketPipe
from minillm.parallel.place import Place, Topology
from minillm.parallel.shared_memory import (
    SharedGroup,
    SharedMemoryCommunicator,
    shared_memory_works,
)
from minillm.parallel.sockets import SocketCommunicator


def connect_ranks(topology: Topology, opened: ExitStack) -> list[dict[str, int]]:
    """The descriptors that each rank inherits, which `opened` closes: shared memory of its group
    ("memory"), or sockets to each rank of it, and to neighbouring stages, by their numbers."""
    every = range(topology.num_ranks)
    fds: list[dict[str, int]] = [{} for _ in every]

    def link(one: int, other: int) -> None:
        for end, rank, peer in zip(socketpair(), (one, other), (other, one), strict=True):
            fds[rank][str(peer)] = opened.enter_context(end).fileno()

    for ranks in dict.fromkeys(map(topology.group, every)):
        if len(ranks) > 1 and shared_memory_works():
            shared = opened.enter_context(closing(SharedGroup(len(ranks))))
            for rank in ranks:
                fds[rank]["memory"] = shared.fd
        else:
            for pair in combinations(ranks, 2):
                link(*pair)
    for rank in every:
        if (after := topology.after(rank)) is not None:
            link(rank, after)
    return fds


def join(plain: dict[str, Any], met: Meeting | None = None) -> Place:
    """The place of a rank, by the `group` of its `SetUp`: it has inherited connections, finds the
    others in a store, or has met them."""
    if plain.get("backend"):
        from minillm.parallel.device_groups import join_devices

        return join_devices(plain)
    if "store" in plain and met is None:
        with closing(Meeting(Address(*plain["store"]), plain["rank"])) as met:
            return join(plain, met)
    rank, patience, fds = plain["rank"], plain["patience"], plain.get("fds", {})

    def link(other: int) -> socket:
        return socket(fileno=fds[str(other)]) if met is None else met.link(other)

    def group(ranks: range) -> Communicator:
        if "memory" in fds:
            return SharedMemoryCommunicator(ranks.index(rank), fds["memory"], patience)
        links = [None if other == rank else link(other) for other in ranks]
        return SocketCommunicator(ranks.index(rank), links, patience)

    topology = Topology(**plain["topology"])
    return topology.place(rank, group, lambda other: SocketPipe(link(other), patience))
