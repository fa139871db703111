"""A communicator over stream sockets, one between each two ranks: between machines, and on one
machine where memory cannot be shared.

Each rank sends its part to all others and adds the parts in rank order. Between machines,
`meeting.py` opens the connections.
"""

import select
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic

import torch
from torch import Tensor

from minillm.parallel.communicator import PATIENCE, Communicator
from minillm.parallel.worker import HANG_UP

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
        """[..] -> [size, ..]"""
        received = part.new_empty((self.size, *part.shape))
        received[self.rank] = part
        self._swap([part] * self.size, received.unbind(0))
        return received

    def distribute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[M, w], [size, size] -> [R, w]; each row is sent to its destination only."""
        sent, expected = counts[self.rank].tolist(), counts[:, self.rank].tolist()
        received = rows.new_empty((sum(expected), rows.shape[1]))
        parts, places = rows.split(sent), received.split(expected)
        places[self.rank].copy_(parts[self.rank])
        self._swap(parts, places)
        return received

    def abort(self) -> None:
        """Close the connections, which the other ranks see as end of stream."""
        self.close()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        others, self._others = self._others, {}
        for each in others.values():
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _swap(self, parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Send `parts[rank]` to each other rank while `places[rank]` is filled from it."""
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
                except OSError:  # the connection has ended
                    self.close()
                    raise self.stopped() from None
                if swap.differs:
                    self.close()
                    theirs = f"rank {rank}: call %d with %d bytes" % swap.found
                    raise self.unequal(
                        [f"here call {self._num_calls} with {swap.size} bytes", theirs]
                    )
            if not swaps:
                return
            moving = {each.connection: bool(each.unsent) for each in swaps.values()}
            ready = wait({each: moving.get(each) for each in others}, end - monotonic())
            if not ready:
                raise self.waited(self.patience, list(swaps))
            if any(each not in moving for each in ready):  # a rank ended after its own swap
                self.close()
                raise self.stopped()


def as_bytes(x: Tensor) -> Tensor:
    """A view of a contiguous tensor as uint8 [bytes]; an empty tensor may have any strides."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def view(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(as_bytes(x).numpy())  # type: ignore[arg-type]


def wait(sending: Mapping[socket.socket, bool | None], seconds: float) -> list[socket.socket]:
    """Sockets that are readable, writable (True), or, where nothing is left to transfer (None),
    closed by the peer; empty after the timeout."""
    poll, known = select.poll(), {}
    for each, sends in sending.items():
        events = select.POLLIN | select.POLLOUT * bool(sends)
        if (number := each.fileno()) < 0:  # closed by another thread
            return [each]
        poll.register(number, HANG_UP if sends is None else events)
        known[number] = each
    return [known[number] for number, _ in poll.poll(max(seconds, 0) * 1000)]


class Swap:
    """The unfinished transfer with one other rank in one call."""

    def __init__(self, connection: socket.socket, call: int, part: memoryview, place: memoryview):
        self.connection, self.size = connection, len(place)
        self.own = call, len(place)
        self.head = bytearray(HEADER.size)
        self.unsent = [memoryview(HEADER.pack(call, len(part))), part]
        self.missing = [memoryview(self.head), place]

    @property
    def found(self) -> tuple[int, int]:
        """Call number and bytes in the other rank's header."""
        call, size = HEADER.unpack(self.head)
        return call, size

    @property
    def differs(self) -> bool:
        """Whether the other rank's header has arrived and describes another call."""
        return len(self.missing) < 2 and self.found != self.own

    def go_on(self) -> bool:
        """Transfer without blocking; whether all is done. Raises OSError at end of stream."""
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
