"""How ranks on several machines reach each other: the driver says where each listens.

Of two ranks the one with the higher number connects. A link has a name, which the driver's engine
is part of, so a rank of another engine never takes the place of one of this.
"""

from collections.abc import Callable, Sequence
from secrets import token_hex
from socket import socket
from time import monotonic
from typing import Any

from minillm.errors import NodeError
from minillm.parallel.communicator import Alone, Communicator
from minillm.parallel.handshake import MOST
from minillm.parallel.listener import Listener, connect
from minillm.parallel.pipes import SocketPipe
from minillm.parallel.place import Place
from minillm.parallel.sockets import SocketCommunicator
from minillm.parallel.split import Stage

START_PATIENCE = 300.0  # seconds in which the other ranks connect


class NodeGroups:
    """What `Groups` is for ranks of this machine, with the addresses of all ranks."""

    def __init__(
        self,
        addresses: Sequence[Sequence[Any]],
        size: int,
        num_stages: int,
        patience: float,
        num_copies: int = 1,
        share_experts: bool = False,
    ):
        self.addresses, self.patience = addresses, patience
        self.size, self.num_stages = size, num_stages
        self.num_copies, self.share_experts = num_copies, share_experts
        self.engine = token_hex(8)
        self.release: Callable[[], None] = lambda: None

    def of(self, rank: int) -> dict[str, Any]:
        """What a rank joins, as plain data."""
        stage = rank // self.size
        common = {
            "engine": self.engine,
            "addresses": self.addresses,
            "me": rank,
            "patience": self.patience,
        }
        if self.num_copies > 1:
            return common | {"copies": self.num_copies, "share_experts": self.share_experts}
        return common | {
            "ranks": [stage * self.size + each for each in range(self.size)],
            "stage": [stage, self.num_stages],
            "before": rank - self.size if stage else None,
            "after": rank + self.size if stage < self.num_stages - 1 else None,
        }

    def fds_of(self, rank: int) -> list[int]:
        """None: no process inherits anything."""
        return []

    def close(self) -> None:
        """Give back what started them."""
        self.release()


class Meeting:
    """A rank's connections to others; `listener` is its own."""

    def __init__(self, listener: Listener, secret: bytes):
        self._listener, self._secret = listener, secret
        self._arrived: dict[str, socket] = {}

    def link(self, plain: dict[str, Any], other: int, name: str) -> socket:
        """The connection of this name to another rank.

        Raises NodeError where it does not come about.
        """
        me, end = plain["me"], monotonic() + START_PATIENCE
        name = f"{plain['engine']} {name} {min(me, other)}-{max(me, other)}"
        if other < me:
            host, port = plain["addresses"][other]
            here = self._listener.address[0]
            return connect(host, port, self._secret, START_PATIENCE, here, link=name).connection
        while name not in self._arrived:
            if (found := self._listener.next(end - monotonic())) is None:
                raise NodeError(
                    f"Rank {me} waited {START_PATIENCE:g} s for rank {other} to connect to it; "
                    "see that all nodes reach each other."
                )
            self._arrived[str(found.hello.get("link"))[:MOST]] = found.connection
        return self._arrived.pop(name)

    def group(
        self, plain: dict[str, Any], ranks: Sequence[int], name: str, patience: float
    ) -> Communicator:
        """The communicator of these ranks, of which this is one."""
        if len(ranks) == 1:
            return Alone()
        links = [None if each == plain["me"] else self.link(plain, each, name) for each in ranks]
        return SocketCommunicator(list(ranks).index(plain["me"]), links, patience)

    def join(self, plain: dict[str, Any]) -> Place:
        """This rank's place, by what `NodeGroups.of` says."""
        patience = plain["patience"]
        if "copies" in plain:
            copies, shares = range(plain["copies"]), plain["share_experts"]
            experts = self.group(plain, copies, "experts", patience) if shares else None
            return Place(Alone(), copy=plain["me"], experts=experts)
        communicator = self.group(plain, plain["ranks"], "stage", patience)
        before, after = (
            None
            if plain[each] is None
            else SocketPipe(self.link(plain, plain[each], "pipe"), patience)
            for each in ("before", "after")
        )
        return Place(communicator, Stage(*plain["stage"]), before, after)

    def close(self) -> None:
        """Nothing more is to come. Closing twice is fine."""
        self._listener.close()
        for each in self._arrived.values():
            each.close()
