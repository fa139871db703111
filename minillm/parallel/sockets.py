"""Ranks on several machines: a connection between each two, of a kind that proves who is there.

Every rank sends its part to all others, and adds what it has in rank order. Gloo lets anyone
connect who reaches its port.
"""

import select
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic

from torch import Tensor

from minillm.parallel.communicator import PATIENCE, Communicator
from minillm.parallel.gloo import as_bytes

HEADER = struct.Struct(">QQ")  # number of the call, bytes that follow


class SocketCommunicator(Communicator):
    """One process of a group.

    Args:
        rank: of this process.
        connections: to all ranks; None for its own.
        patience: seconds to wait for the other ranks in each call.
    """

    def __init__(
        self, rank: int, connections: Sequence[socket.socket | None], patience: float = PATIENCE
    ):
        super().__init__(rank, len(connections))
        self.patience = patience
        self._others = {n: each for n, each in enumerate(connections) if each is not None}
        for each in self._others.values():
            each.setblocking(False)
        self._num_calls = 0

    def exchange(self, part: Tensor) -> Tensor:
        """[..] -> [size, ..]; any dtype, because bytes are sent."""
        received = part.new_empty((self.size, *part.shape))
        places = as_bytes(received).view(self.size, part.nbytes)
        places[self.rank] = as_bytes(part)
        self._swap([as_bytes(part)] * self.size, list(places.unbind(0)))
        return received

    def distribute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[M, w], [size, size] -> [R, w]; each row is sent to its rank only."""
        sent, expected = counts[self.rank].tolist(), counts[:, self.rank].tolist()
        received = rows.new_empty((sum(expected), rows.shape[1]))
        parts, places = rows.split(sent), received.split(expected)
        places[self.rank].copy_(parts[self.rank])
        self._swap([as_bytes(each) for each in parts], [as_bytes(each) for each in places])
        return received

    def abort(self) -> None:
        """The others see the end of the connection."""
        self.close()

    def close(self) -> None:
        """Close the connections; the others' calls raise. Closing twice is fine."""
        others, self._others = self._others, {}
        for each in others.values():
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _swap(self, parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Send each rank its part, while the places fill with what comes."""
        if len(self._others) < self.size - 1:
            raise self.stopped()
        self._num_calls += 1
        swaps = {
            rank: Swap(connection, self._num_calls, view(parts[rank]), view(places[rank]))
            for rank, connection in self._others.items()
        }
        others, end = list(self._others.values()), monotonic() + self.patience
        while True:
            for rank, swap in list(swaps.items()):
                try:
                    if swap.go_on():
                        del swaps[rank]
                except OSError:  # it has ended
                    self.close()
                    raise self.stopped() from None
                if swap.differs:
                    self.close()
                    said = f"rank {rank}: call %d with %d bytes" % swap.found
                    raise self.unequal(
                        [f"here call {self._num_calls} with {swap.size} bytes", said]
                    )
            if not swaps:
                return
            moving = {each.connection: bool(each.unsent) for each in swaps.values()}
            ready = wait({each: moving.get(each) for each in others}, end - monotonic())
            if not ready:
                raise self.waited(self.patience, list(swaps))
            if any(each not in moving for each in ready):  # it has done its part, and ended
                self.close()
                raise self.stopped()


def hang_up() -> int:
    """What `poll` tells where the other end has closed; POLLRDHUP is Linux's."""
    return getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


def view(x: Tensor) -> memoryview:
    """The bytes of a tensor."""
    return memoryview(x.numpy())  # type: ignore[arg-type]


def wait(sending: Mapping[socket.socket, bool | None], seconds: float) -> list[socket.socket]:
    """Connections on which something happens before the time is over: bytes come, there is room to
    send some (True), or, where nothing is to move (None), the other rank ends."""
    poll, known = select.poll(), {}
    for each, sends in sending.items():
        events = select.POLLIN | select.POLLOUT * bool(sends)
        if (number := each.fileno()) < 0:  # closed by another thread
            return [each]
        poll.register(number, hang_up() if sends is None else events)
        known[number] = each
    return [known[number] for number, _ in poll.poll(max(seconds, 0) * 1000)]


class Swap:
    """What is still to be sent to one rank, and to come from it, in one call."""

    def __init__(self, connection: socket.socket, call: int, part: memoryview, place: memoryview):
        self.connection, self.size = connection, len(place)
        self.own = call, len(place)
        self.head = bytearray(HEADER.size)
        self.unsent = [memoryview(HEADER.pack(call, len(part))), part]
        self.missing = [memoryview(self.head), place]

    @property
    def found(self) -> tuple[int, int]:
        """Call and bytes of the other rank."""
        call, size = HEADER.unpack(self.head)
        return call, size

    @property
    def differs(self) -> bool:
        """Whether the other rank has brought something else."""
        return len(self.missing) < 2 and self.found != self.own

    def go_on(self) -> bool:
        """Move what can be moved now; whether all is done. Raises OSError at the end of the
        connection."""
        with suppress(BlockingIOError):
            while self.unsent:
                count = self.connection.sendmsg(self.unsent)
                while self.unsent and count >= len(self.unsent[0]):
                    count -= len(self.unsent.pop(0))
                if self.unsent:
                    self.unsent[0] = self.unsent[0][count:]
        with suppress(BlockingIOError):
            while self.missing and not self.differs:
                count = self.connection.recv_into(self.missing[0]) if len(self.missing[0]) else 0
                if not count and len(self.missing[0]):
                    raise ConnectionError
                self.missing[0] = self.missing[0][count:]
                if not len(self.missing[0]):
                    self.missing.pop(0)
        return not self.unsent and not self.missing
