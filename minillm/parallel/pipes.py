"""From one stage of a pipeline to the next: activations, in the order of the plans."""

import socket
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from time import perf_counter

import torch
from torch import Tensor

from minillm.parallel.communicator import CommunicationError, Traffic


class Pipe:
    """One end of a one-way connection between the same ranks of neighbouring stages."""

    def __init__(self) -> None:
        self.calls = self.num_bytes = 0
        self.seconds = 0.0  # in which a receiver has waited

    @property
    def traffic(self) -> Traffic:
        """What went through this end."""
        return Traffic(self.calls, self.num_bytes)

    def send(self, x: Tensor) -> None:
        """Hand [N, d] on; the receiver may be several plans behind."""
        self._count(x)
        self.put(x)

    def receive(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The oldest tensor that was not received, which has this shape and dtype."""
        start = perf_counter()
        x = self.get(shape, dtype)
        self.seconds += perf_counter() - start
        self._count(x)
        return x

    def put(self, x: Tensor) -> None:
        """Send without counting."""
        raise NotImplementedError

    def get(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Receive without counting."""
        raise NotImplementedError

    def abort(self) -> None:
        """This end has failed: a receiver that waits raises."""

    def close(self) -> None:
        """Give back what the connection needs of the system. Closing twice is fine."""

    def _count(self, x: Tensor) -> None:
        self.calls += 1
        self.num_bytes += x.nbytes


class ThreadPipe(Pipe):
    """Between two threads, which share this object."""

    def __init__(self, patience: float):
        super().__init__()
        self.patience = patience
        self._queue: SimpleQueue[Tensor | None] = SimpleQueue()

    def send(self, x: Tensor) -> None:
        """Counted once, by the receiver."""
        self.put(x)

    def put(self, x: Tensor) -> None:
        """A copy: the sender's memory may be used again."""
        self._queue.put(x.clone())

    def get(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Raises CommunicationError where nothing comes, or the sender has failed."""
        try:
            x = self._queue.get(timeout=self.patience)
        except Empty:
            raise CommunicationError(
                f"Nothing came from the stage before in {self.patience:g} seconds."
            ) from None
        if x is None:
            self.abort()  # for the next call
            raise CommunicationError("The stage before has failed.")
        return x

    def abort(self) -> None:
        """Whoever receives gets an error."""
        self._queue.put(None)


class SocketPipe(Pipe):
    """Between two processes: one end of a socket. A thread sends, so that a stage does not wait for
    the next one to take what it has computed."""

    def __init__(self, end: socket.socket, patience: float):
        super().__init__()
        self._socket, self.patience = end, patience
        self._queue: SimpleQueue[Tensor | None] = SimpleQueue()
        self._sender: Thread | None = None

    def put(self, x: Tensor) -> None:
        """A copy: the sender's memory may be used again."""
        if self._sender is None:
            self._socket.settimeout(None)
            self._sender = Thread(target=self._send_all, name="minillm-pipe", daemon=True)
            self._sender.start()
        self._queue.put(x.detach().to("cpu", copy=True).contiguous())

    def get(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Raises CommunicationError where nothing comes, or the sender has ended."""
        x = torch.empty(shape, dtype=dtype)
        rest = memoryview(x.view(torch.uint8).numpy().reshape(-1))  # type: ignore[arg-type]
        self._socket.settimeout(self.patience)
        while len(rest):
            try:
                count = self._socket.recv_into(rest)
            except TimeoutError:
                raise CommunicationError(
                    f"Nothing came from the stage before in {self.patience:g} seconds."
                ) from None
            except OSError as error:
                raise CommunicationError(f"The stage before is gone: {error}.") from None
            if not count:
                raise CommunicationError("The stage before has ended.")
            rest = rest[count:]
        return x

    def abort(self) -> None:
        """The other end sees the end of the stream."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._queue.put(None)
        self.abort()
        self._socket.close()

    def _send_all(self) -> None:
        while (x := self._queue.get()) is not None:
            try:
                self._socket.sendall(memoryview(x.view(torch.uint8).numpy().reshape(-1)))  # type: ignore[arg-type]
            except OSError:  # the next stage is gone, which the driver notices
                return
