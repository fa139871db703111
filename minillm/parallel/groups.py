"""How ranks that are processes reach each other: the driver opens a group, each rank joins it."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from minillm.parallel.communicator import Communicator
from minillm.parallel.gloo import GlooCommunicator
from minillm.parallel.shared_memory import (
    SharedGroup,
    SharedMemoryCommunicator,
    shared_memory_works,
)

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


def join(plain: dict[str, Any], rank: int, size: int) -> Communicator:
    """A rank's communicator, in the group with this description."""
    if plain["kind"] == "memory":
        return SharedMemoryCommunicator(rank, plain["fd"], plain["patience"])
    from torch.distributed import TCPStore

    store = TCPStore(LOOPBACK, plain["port"], timeout=timedelta(seconds=START_PATIENCE))
    communicator = GlooCommunicator(rank, size, store, START_PATIENCE)
    communicator.patience = plain["patience"]
    return communicator
