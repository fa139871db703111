"""A communicator for ranks on one machine: sums and gathers in shared memory, by `shared_sum.c`.

A sum of 4 KB takes a few microseconds; over sockets it takes tens to hundreds. The driver opens a
`SharedGroup` and passes its file descriptor to the ranks. The memory has no name, so none is left
behind when processes are killed.
"""

import mmap
import os
import sys
from collections.abc import Callable
from ctypes import addressof, c_char, c_int64
from functools import cache
from struct import pack_into, unpack_from

import torch
from torch import Tensor

from minillm.errors import UnsupportedFeatureError
from minillm.ops import cpu
from minillm.ops.c_library import Library, NoLibrary, library
from minillm.parallel.communicator import PATIENCE, Communicator

ROOM = 2**20  # bytes of a part that are exchanged at once; larger parts go in pieces
STEP = 4096  # `room` is a multiple of this
DONE, LATE, ABORTED, UNEQUAL = range(4)  # as in shared_sum.c
KINDS = ("", "sum", "gather")


@cache
def functions(dtype: torch.dtype = torch.float32) -> Library | NoLibrary:
    """The library whose `shared_sum` adds this dtype, or why there is none. `shared_gather` of each
    library takes any dtype."""
    element = dict(cpu.ELEMENTS).get(dtype)
    if element is None:
        return NoLibrary(f"C does not add {dtype}")
    return library(element)


def why_not() -> str:
    """Why ranks cannot share memory, without a full stop; empty if they can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "this system has no memory files (memfd_create)"
    compiled = functions()
    return str(compiled) if isinstance(compiled, NoLibrary) else ""


def shared_memory_works() -> bool:
    """Whether ranks on this machine can share memory."""
    return not why_not()


class SharedGroup:
    """The memory of a group. Its ranks open it by `fd`, also from other processes (`pass_fds`).

    Args:
        size: number of ranks.
        room: bytes of a part that are exchanged at once; the memory is about 2 * size * room.

    Raises:
        UnsupportedFeatureError: memory cannot be shared here.
    """

    def __init__(self, size: int, room: int = ROOM):
        shared_bytes = needed_functions().shared_bytes
        room = max(-(-room // STEP), 1) * STEP
        self.size, self.fd = size, -1
        try:
            self.fd = os.memfd_create("minillm-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, shared_bytes(size, room))
            seal_size(self.fd)
            with mmap.mmap(self.fd, 0) as memory:
                pack_into("qq", memory, 0, size, room)
        except OSError as error:
            self.close()
            raise refusal(str(error)) from error

    def communicators(self, patience: float = PATIENCE) -> list["SharedMemoryCommunicator"]:
        """One per rank, where the ranks are threads of this process."""
        return [SharedMemoryCommunicator(rank, self.fd, patience) for rank in range(self.size)]

    def close(self) -> None:
        """Close the file; ranks that have opened it keep the memory. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class SharedMemoryCommunicator(Communicator):
    """One rank of a group.

    Args:
        rank: of this process or thread.
        fd: that of the `SharedGroup`; it may be closed afterwards.
        patience: seconds to wait for the other ranks in each call.

    Raises:
        UnsupportedFeatureError: memory cannot be shared here.
    """

    def __init__(self, rank: int, fd: int, patience: float = PATIENCE):
        self._functions, self.patience = needed_functions(), patience
        try:
            self._memory: mmap.mmap | None = mmap.mmap(fd, 0)
        except (OSError, ValueError) as error:
            raise refusal(str(error)) from error
        size, room = unpack_from("qq", self._memory, 0)
        if not 0 <= rank < size or self._functions.shared_bytes(size, room) != len(self._memory):
            raise refusal(f"file descriptor {fd} is not that of a group with a rank {rank}")
        super().__init__(rank, size)
        self._has_failed = False

    def add_up(self, part: Tensor) -> None:
        """In C for the dtypes that it supports."""
        compiled = functions(part.dtype)
        if isinstance(compiled, NoLibrary) or not part.is_cpu:
            super().add_up(part)
        else:
            self._call(compiled.shared_sum, part.data_ptr(), part.numel())

    def exchange(self, part: Tensor) -> Tensor:
        own = part.cpu()
        parts = own.new_empty((self.size, *part.shape))
        gather = self._functions.shared_gather
        self._call(gather, own.data_ptr(), own.nbytes, parts.data_ptr())
        return parts.to(part.device)

    def abort(self) -> None:
        """Set the group's flag, which every waiting rank polls."""
        if self._memory is not None:
            self._functions.shared_abort(address(self._memory))

    def close(self) -> None:
        """Unmap the memory, once a call that is still waiting has returned."""
        self._memory = None

    def _call(self, function: Callable[..., int], *arguments: int) -> None:
        memory = self._memory  # keeps it mapped if another thread calls `close`
        if memory is None or self._has_failed:
            raise self.stopped()
        report = (c_int64 * self.size)()
        status = function(address(memory), self.rank, *arguments, self.patience, report)
        if status == DONE:
            return
        self._has_failed = True  # the ranks may be in different calls now
        if status == LATE:
            raise self.waited(self.patience, [rank for rank, late in enumerate(report) if late])
        if status == UNEQUAL:
            raise self.unequal([f"{code // 4} bytes to a {KINDS[code % 4]}" for code in report])
        raise self.stopped()


def needed_functions() -> Library:
    """The library for float32. Raises UnsupportedFeatureError where memory cannot be shared."""
    reason, compiled = why_not(), functions()
    if reason or isinstance(compiled, NoLibrary):
        raise refusal(reason)
    return compiled


def seal_size(fd: int) -> None:
    """Fix the size of the file: reading beyond the end of a truncated one would kill a rank."""
    import fcntl  # not on all systems

    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def refusal(reason: str) -> UnsupportedFeatureError:
    """The error for memory that cannot be shared."""
    return UnsupportedFeatureError(f"Ranks cannot share memory here: {reason}; use sockets.")


def address(memory: mmap.mmap) -> int:
    """Where the memory is mapped."""
    return addressof(c_char.from_buffer(memory))
