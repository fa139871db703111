"""A communicator over gloo, PyTorch's CPU backend: the peer to which `collectives` compares ours.

A group has a prefix of a store, so one process can be in several. A waiting call checks the store a
few times per second: a rank that fails sets a key there, and each waiting rank writes its call, so
that an error names the missing ranks.

Parts of unequal size end the process inside gloo; `checks_sizes` compares the sizes before each
call, which doubles its time.
"""

from collections.abc import Callable
from contextlib import suppress
from ctypes import py_object, pythonapi
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from minillm.errors import in_one_line
from minillm.parallel.communicator import PATIENCE, CommunicationError, Communicator

LOOK = 0.2  # seconds between checks of the store
FAILED = "failed"  # the key that a rank sets when it fails
Gloo: Any = ProcessGroupGloo  # its stubs lack most methods


class GlooCommunicator(Communicator):
    """One process of a group.

    Args:
        rank, size: of this process.
        store: one that all ranks reach, such as a `TCPStore`.
        patience: seconds to wait for the other ranks, at the start and in each call.
        name: of the group, unique within the store.
        host: name or address of the network interface.
        checks_sizes: raise for parts of unequal size.

    Raises:
        CommunicationError: ranks did not arrive, or the interface does not exist.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        patience: float = PATIENCE,
        name: str = "ranks",
        host: str = "127.0.0.1",
        checks_sizes: bool = False,
    ):
        super().__init__(rank, size)
        self.patience, self.checks_sizes = patience, checks_sizes
        self._store = PrefixStore(name, store)
        self._num_calls = 0
        self._group: Any = None
        self._work: Any = None  # the running or failed call
        try:
            options = Gloo._Options()
            options._devices = [Gloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=patience)
            options._threads = 1
            self._arrive()
            self._group = Gloo(PrefixStore("gloo", self._store), rank, size, options)
        except RuntimeError as error:  # of gloo or the store
            raise self._explained(error) from None

    def exchange(self, part: Tensor) -> Tensor:
        """[..] -> [size, ..]; any dtype, because bytes are sent."""
        if self.checks_sizes:
            self._check_size(part)
        return self._gather(part)

    def distribute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """[M, w], [size, size] -> [R, w]; each row is sent to its destination only."""
        width = rows.element_size() * rows.shape[1]
        sent, expected = (
            (counts * width)[self.rank].tolist(),
            (counts * width)[:, self.rank].tolist(),
        )
        received = rows.new_empty((int(counts[:, self.rank].sum()), rows.shape[1]))
        places = as_bytes(received), as_bytes(rows)
        self._call(lambda group: group.alltoall_base(*places, expected, sent))
        return received

    def abort(self) -> None:
        """The others' calls raise within `LOOK` seconds."""
        with suppress(RuntimeError):  # the store has ended, so the other ranks fail too
            self._store.set(FAILED, str(self.rank))
        self.close()

    def close(self) -> None:
        """Close the connections; calls of the other ranks raise. Idempotent."""
        group, self._group = self._group, None
        if group is not None and self._work is not None and not self._work.is_completed():
            # Destroying it would block until the call times out, so it is kept alive.
            pythonapi.Py_IncRef(py_object(group))

    def _gather(self, part: Tensor) -> Tensor:
        """[..] -> [size, ..]"""
        received = part.new_empty((self.size, *part.shape))
        places = list(as_bytes(received).view(self.size, part.nbytes).unbind(0))
        self._call(lambda group: group.allgather([places], [as_bytes(part)]))
        return received

    def _call(self, start: Callable[[Any], Any]) -> None:
        """Start a call and wait until it has ended."""
        group = self._group
        if group is None:
            raise self.stopped()
        self._num_calls += 1
        try:
            self._work = start(group)
            self._wait(self._work)
            self._work = None
        except RuntimeError as error:
            raise self._explained(error) from None

    def _wait(self, work: Any) -> None:
        """Wait for a call. Raises gloo's error, or CommunicationError."""
        deadline = monotonic() + self.patience
        while True:
            try:
                work.wait(timedelta(seconds=LOOK))
                return
            except RuntimeError:
                if work.is_completed() or monotonic() > deadline:
                    raise
            self._arrive()
            if self._store.check([FAILED]):
                raise self.stopped()

    def _arrive(self) -> None:
        """Publish in which call this rank waits."""
        self._store.set(f"call of {self.rank}", str(self._num_calls))

    def _missing(self) -> list[int]:
        """The ranks that have not started this call."""
        others = [(each, f"call of {each}") for each in range(self.size) if each != self.rank]
        return [
            each
            for each, key in others
            if not self._store.check([key]) or int(self._store.get(key)) < self._num_calls
        ]

    def _explained(self, error: RuntimeError) -> CommunicationError:
        """The error of gloo or the store as one that names this rank."""
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            try:
                return self.waited(self.patience, self._missing())
            except RuntimeError:  # the store has ended
                pass
        if "closed by peer" in text or "reset by peer" in text:
            return self.stopped()
        return CommunicationError(
            f"Rank {self.rank} of {self.size} cannot reach the other ranks: {in_one_line(error)}"
        )

    def _check_size(self, part: Tensor) -> None:
        """CommunicationError if the ranks' parts have unequal sizes."""
        sizes = self._gather(torch.tensor([part.nbytes])).flatten().tolist()
        if len(set(sizes)) > 1:
            raise self.unequal([f"{each} bytes" for each in sizes])


def as_bytes(x: Tensor) -> Tensor:
    """A view of a contiguous tensor: uint8 [bytes]. Strides of an empty one may be anything."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
