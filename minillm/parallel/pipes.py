"""One-way links between neighbouring pipeline stages: activations, in the order of the plans."""

import socket
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter

import torch
from torch import Tensor

from minillm.parallel.communicator import CommunicationError, Traffic
from minillm.parallel.sockets import view


class Pipe:
    """A link between the same share of neighbouring stages, which are threads and share this
    object. `patience` is the number of seconds that the receiver waits."""

    def __init__(self, patience: float = 0.0) -> None:
        self.patience = patience
        self.calls = self.num_bytes = 0
        self.seconds = 0.0  # spent waiting in `receive`
        self._queue: SimpleQueue[Tensor | None] = SimpleQueue()

    @property
    def traffic(self) -> Traffic:
        """Calls and bytes of this end."""
        return Traffic(self.calls, self.num_bytes)

    def send(self, x: Tensor) -> None:
        """Send a copy of [N, d] without waiting; the receiver may be several plans behind, and
        counts it."""
        self._queue.put(x.clone())

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The oldest tensor not yet received, of this shape and dtype.

        Raises:
            CommunicationError: nothing comes in time, or the sender has failed.
        """
        start = perf_counter()
        x = self.get(shape, dtype)
        self.seconds += perf_counter() - start
        self._count(x)
        return x

    def get(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The transport of `receive`."""
        try:
            x = self._queue.get(timeout=self.patience)
        except Empty:
            raise self.late() from None
        if x is None:
            self.abort()  # for the next call
            raise CommunicationError("The stage before has failed.")
        return x

    def abort(self) -> None:
        """Make the receiver raise, after a failure of the sender."""
        self._queue.put(None)

    def close(self) -> None:
        """Release system resources. Idempotent."""

    def late(self) -> CommunicationError:
        """The error for a timeout."""
        return CommunicationError(
            f"Nothing came from the stage before in {self.patience:g} seconds."
        )

    def _count(self, x: Tensor) -> None:
        self.calls += 1
        self.num_bytes += x.nbytes


class SocketPipe(Pipe):
    """One end of a link between two processes. A thread sends, so that a stage does not wait for
    the next one to receive."""

    def __init__(self, end: socket.socket, patience: float):
        super().__init__(patience)
        self._socket = end
        self._sender: Thread | None = None

    def send(self, x: Tensor) -> None:
        """Queue a copy for the sending thread."""
        self._count(x)
        if self._sender is None:
            self._socket.settimeout(None)
            self._sender = Thread(target=self._send_all, name="minillm-pipe", daemon=True)
            self._sender.start()
        self._queue.put(x.detach().to("cpu", copy=True).contiguous())

    def get(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype)
        rest = view(x)
        self._socket.settimeout(self.patience)
        while len(rest):
            try:
                count = self._socket.recv_into(rest)
            except TimeoutError:
                raise self.late() from None
            except OSError as error:
                raise CommunicationError(f"The stage before is gone: {error}.") from None
            if not count:
                raise CommunicationError("The stage before has ended.")
            rest = rest[count:]
        return x

    def abort(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._queue.put(None)
        self.abort()
        self._socket.close()

    def _send_all(self) -> None:
        while (x := self._queue.get()) is not None:
            try:
                self._socket.sendall(view(x))
            except OSError:  # the next stage is gone, which the driver notices
                return
