"""A communicator over stream sockets, one between each two ranks: between machines, and on one
machine where memory cannot be shared.

Each rank sends its part to all others and adds the parts in rank order. Between machines,
`meeting.py` opens the connections.
"""

import select
import socket
import struct
from collections.abc import Iterable, Sequence
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
        for connection in self._others.values():
            connection.setblocking(False)
        self._num_calls = 0

    def exchange(self, part: Tensor) -> Tensor:
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
        others, self._others = self._others, {}
        for connection in others.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _swap(self, parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Send `parts[rank]` to each other rank while `places[rank]` is filled from it."""
        if len(self._others) < self.size - 1:
            raise self.stopped()
        self._num_calls += 1
        swaps = {
            rank: Swap(connection, self._num_calls, view(parts[rank]), view(places[rank]))
            for rank, connection in self._others.items()
        }
        end = monotonic() + self.patience
        try:
            while unfinished := [rank for rank, swap in swaps.items() if not swap.go_on()]:
                ready = wait(swaps.values(), end - monotonic())
                if not ready:
                    raise self.waited(self.patience, unfinished)
                if any(each.is_done for each in ready):  # that rank has ended after its own swap
                    raise ConnectionError
        except OSError:  # the connection has ended
            self.close()
            raise self.stopped() from None
        except Unequal as error:
            self.close()
            raise self.unequal(error.args) from None


def as_bytes(x: Tensor) -> Tensor:
    """A view of a contiguous tensor as uint8 [bytes]; an empty tensor may have any strides."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def view(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(as_bytes(x).numpy())  # type: ignore[arg-type]


def wait(swaps: Iterable["Swap"], seconds: float) -> list["Swap"]:
    """Those that can go on, or, of those that are done, whose peer has closed the connection; empty
    after the timeout. Raises OSError where another thread has closed one."""
    poll, known = select.poll(), {}
    for swap in swaps:
        events = select.POLLIN | select.POLLOUT * bool(swap.unsent)
        if (number := swap.connection.fileno()) < 0:
            raise ConnectionError
        poll.register(number, HANG_UP if swap.is_done else events)
        known[number] = swap
    return [known[number] for number, _ in poll.poll(max(seconds, 0) * 1000)]


class Unequal(Exception):
    """Two ranks are in different calls; the arguments describe this rank's and the other's."""


class Swap:
    """The transfer with one other rank in one call."""

    def __init__(self, connection: socket.socket, call: int, part: memoryview, place: memoryview):
        self.connection, self.expected = connection, HEADER.pack(call, len(place))
        self.head = bytearray(HEADER.size)
        self.unsent = [memoryview(HEADER.pack(call, len(part))), part]
        self.missing = [memoryview(self.head), place]

    @property
    def is_done(self) -> bool:
        """Whether all is sent and received."""
        return not self.unsent and not self.missing

    def go_on(self) -> bool:
        """Transfer without blocking; whether all is done.

        Raises:
            OSError: the peer has closed the connection.
            Unequal: it has made another call.
        """
        with suppress(BlockingIOError):
            while self.unsent:
                advance(self.unsent, self.connection.sendmsg(self.unsent))
        with suppress(BlockingIOError):
            while self.missing:
                count = self.connection.recvmsg_into(self.missing)[0]
                if not count:
                    raise ConnectionError
                advance(self.missing, count)
                if len(self.missing) < 2 and self.head != self.expected:
                    calls = HEADER.unpack(self.expected), HEADER.unpack(self.head)
                    raise Unequal(*(f"call {call} with {size} bytes" for call, size in calls))
        return self.is_done


def advance(left: list[memoryview], count: int) -> None:
    """Remove the first `count` bytes."""
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if left:
        left[0] = left[0][count:]
