"""Connections of ranks that are processes of one machine: the driver opens them, and each rank
inherits the descriptors of its own."""

from contextlib import closing
from dataclasses import asdict
from itertools import combinations
from socket import socket, socketpair
from typing import Any

from minillm.parallel.meeting import Address, Meeting
from minillm.parallel.place import Place, Topology
from minillm.parallel.shared_memory import SharedGroup, shared_memory_works


class Groups:
    """Shared memory for each group of ranks, or sockets between each two of them; sockets between
    pipeline stages."""

    def __init__(self, topology: Topology, patience: float):
        self.topology, self.patience = topology, patience
        self._fds: list[dict[str, int]] = [{} for _ in range(topology.num_ranks)]
        self._opened: list[SharedGroup | socket] = []
        try:
            for ranks in dict.fromkeys(map(topology.group, range(topology.num_ranks))):
                if len(ranks) > 1:
                    self._connect(ranks)
            for rank in range(topology.num_ranks):
                if (after := topology.after(rank)) is not None:
                    self._link(rank, after)
        except BaseException:
            self.close()
            raise

    def of(self, rank: int) -> dict[str, Any]:
        """What `join` needs, as plain data; descriptors have the numbers of this process."""
        plain = {"topology": asdict(self.topology), "rank": rank, "patience": self.patience}
        return plain | {"fds": self._fds[rank]}

    def fds_of(self, rank: int) -> tuple[int, ...]:
        """The descriptors that a rank inherits."""
        return tuple(self._fds[rank].values())

    def close(self) -> None:
        """Close all descriptors. Idempotent."""
        for each in self._opened:
            each.close()

    def _connect(self, ranks: range) -> None:
        if shared_memory_works():
            shared = SharedGroup(len(ranks))
            self._opened.append(shared)
            for rank in ranks:
                self._fds[rank]["memory"] = shared.fd
            return
        for one, other in combinations(ranks, 2):
            self._link(one, other)

    def _link(self, one: int, other: int) -> None:
        ends = socketpair()
        self._opened += ends
        self._fds[one][str(other)], self._fds[other][str(one)] = (each.fileno() for each in ends)


def join(plain: dict[str, Any], met: Meeting | None = None) -> Place:
    """The place of a rank, by the `group` of its `SetUp`: what `Groups.of` has returned, or a store
    where it finds the others, or has met them."""
    if plain.get("backend"):
        from minillm.parallel.device_groups import join_devices

        return join_devices(plain)
    topology, fds = Topology(**plain["topology"]), plain.get("fds", {})

    def link(other: int) -> socket:
        return socket(fileno=fds[str(other)]) if met is None else met.link(other)

    if "store" in plain and met is None:
        with closing(Meeting(Address(*plain["store"]), plain["rank"])) as met:
            return topology.place_of_process(plain["rank"], plain["patience"], link)
    return topology.place_of_process(plain["rank"], plain["patience"], link, fds.get("memory"))
