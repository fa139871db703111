"""How ranks that are processes reach each other: the driver opens a group, each rank joins it."""

from collections.abc import Sequence
from datetime import timedelta
from socket import socket, socketpair
from typing import Any

from minillm.parallel.communicator import Alone, Communicator
from minillm.parallel.gloo import GlooCommunicator
from minillm.parallel.pipes import SocketPipe
from minillm.parallel.place import Place
from minillm.parallel.shared_memory import (
    SharedGroup,
    SharedMemoryCommunicator,
    shared_memory_works,
)
from minillm.parallel.split import Stage

LOOPBACK = "127.0.0.1"
START_PATIENCE = 1800.0  # seconds in which all ranks arrive


class MemoryGroup:
    """Ranks that share memory: an unnamed file, whose descriptor they inherit."""

    def __init__(self, size: int, patience: float):
        self._shared = SharedGroup(size)
        self.fds: Sequence[int] = (self._shared.fd,)
        self.plain = {"kind": "memory", "fd": self._shared.fd, "patience": patience}

    def close(self) -> None:
        """Close the file. Closing twice is fine."""
        self._shared.close()


class GlooGroup:
    """Ranks that send over TCP, and meet at a store of the driver; the system chooses its port."""

    fds: Sequence[int] = ()

    def __init__(self, patience: float):
        from torch.distributed import TCPStore

        self._store: TCPStore | None = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self.plain = {"kind": "gloo", "port": self._store.port, "patience": patience}

    def close(self) -> None:
        """Close the store. Closing twice is fine."""
        self._store = None


def open_group(size: int, patience: float) -> MemoryGroup | GlooGroup:
    """The fastest group that this machine has; its ranks wait so many seconds for each other."""
    return MemoryGroup(size, patience) if shared_memory_works() else GlooGroup(patience)


class Groups:
    """The groups of all stages of a pipeline, `size` ranks each, and the sockets between stages; or
    of `num_copies` of a model, each of one rank, that may share their experts."""

    def __init__(
        self,
        size: int,
        num_stages: int,
        patience: float,
        num_copies: int = 1,
        share_experts: bool = False,
    ):
        self.size, self.num_stages, self.patience = size, num_stages, patience
        self.num_copies = num_copies
        self._groups: list[MemoryGroup | GlooGroup] = []
        self._ends = [[socketpair() for _ in range(size)] for _ in range(num_stages - 1)]
        try:
            for _ in range(num_stages if size > 1 else 0):
                self._groups.append(open_group(size, patience))
            if share_experts and num_copies > 1:
                self._groups.append(open_group(num_copies, patience))
        except BaseException:
            self.close()
            raise

    def of(self, rank: int) -> dict[str, Any]:
        """What a rank joins, as plain data; descriptors are those of this process."""
        if self.num_copies > 1:
            group = self._groups[0].plain if self._groups else None
            return {"copy": rank, "num_copies": self.num_copies, "experts": group}
        stage, share = divmod(rank, self.size)
        return {
            "group": self._groups[stage].plain if self._groups else None,
            "rank": share,
            "size": self.size,
            "stage": [stage, self.num_stages],
            "before": self._ends[stage - 1][share][1].fileno() if stage else None,
            "after": self._ends[stage][share][0].fileno() if stage < self.num_stages - 1 else None,
            "patience": self.patience,
        }

    def fds_of(self, rank: int) -> list[int]:
        """The descriptors that a rank inherits."""
        plain = self.of(rank)
        stage = plain.get("stage", [0])[0]
        fds = list(self._groups[stage].fds) if self._groups else []
        if self.num_copies > 1:
            return fds
        return [*fds, *(plain[name] for name in ("before", "after") if plain[name] is not None)]

    def close(self) -> None:
        """Give back what they need of the system. Closing twice is fine."""
        for group in self._groups:
            group.close()
        for ends in self._ends:
            for end in ends:
                for each in end:
                    each.close()


def join(plain: dict[str, Any]) -> Place:
    """A rank's place, by what `Groups.of` says."""
    if "copy" in plain:
        copy, group = plain["copy"], plain["experts"]
        experts = None if group is None else join_group(group, copy, plain["num_copies"])
        return Place(Alone(), copy=copy, experts=experts)
    patience, group = plain["patience"], plain["group"]
    communicator: Communicator = Alone()
    if group is not None:
        communicator = join_group(group, plain["rank"], plain["size"])
    before, after = (
        None if plain[name] is None else SocketPipe(socket(fileno=plain[name]), patience)
        for name in ("before", "after")
    )
    return Place(communicator, Stage(*plain["stage"]), before, after)


def join_group(plain: dict[str, Any], rank: int, size: int) -> Communicator:
    """A rank's communicator, in the group with this description."""
    if plain["kind"] == "memory":
        return SharedMemoryCommunicator(rank, plain["fd"], plain["patience"])
    from torch.distributed import TCPStore

    store = TCPStore(LOOPBACK, plain["port"], timeout=timedelta(seconds=START_PATIENCE))
    communicator = GlooCommunicator(rank, size, store, START_PATIENCE)
    communicator.patience = plain["patience"]
    return communicator
