"""Ranks on one machine that share memory: sums and gathers by the C functions of `shared_sum.c`.

A sum of 4 KB takes some microseconds, where gloo takes hundreds. A driver makes a `SharedGroup`
and hands its file descriptor to the ranks; the memory has no name, so none is left behind.
"""

import mmap
import os
import sys
from collections.abc import Callable
from ctypes import CDLL, addressof, c_char, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from struct import pack_into, unpack_from

import torch
from torch import Tensor

from minillm.errors import UnsupportedFeatureError
from minillm.ops import cpu
from minillm.ops.c_library import NoLibrary, library
from minillm.parallel.communicator import PATIENCE, CommunicationError, Communicator

P, N, D = c_void_p, c_int64, c_double
ROOM = 2**20  # bytes of a part; larger ones go in pieces
STEP = 4096  # bytes of which `room` is a multiple
DONE, LATE, ABORTED, UNEQUAL = range(4)  # as in shared_sum.c
KINDS = ("", "sum", "gather")


@dataclass(frozen=True)
class Functions:
    """The C functions of one library."""

    sum: Callable[..., int]
    gather: Callable[..., int]
    abort: Callable[..., None]
    num_bytes: Callable[..., int]


@cache
def functions(dtype: torch.dtype = torch.float32) -> Functions | NoLibrary:
    """The functions that add this type; or why there are none. All of them gather any type."""
    element = dict(cpu.ELEMENTS).get(dtype)
    if element is None:
        return NoLibrary(f"C does not add {dtype}")
    built = library(element)
    return bind(built) if isinstance(built, CDLL) else built


def bind(built: CDLL) -> Functions:
    """The functions of a library."""
    add, gather, num_bytes = built.shared_sum, built.shared_gather, built.shared_bytes
    add.restype = gather.restype = num_bytes.restype = c_int64
    add.argtypes = [P, N, P, N, D, P]
    gather.argtypes = [P, N, P, N, P, D, P]
    built.shared_abort.restype = None
    built.shared_abort.argtypes = [P]
    num_bytes.argtypes = [N, N]
    return Functions(add, gather, built.shared_abort, num_bytes)


def why_not() -> str:
    """Why ranks cannot share memory, in a sentence without its full stop; empty if they can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return "this system has no memory files (memfd_create)"
    found = functions()
    return str(found) if isinstance(found, NoLibrary) else ""


def shared_memory_works() -> bool:
    """Whether ranks on this machine can share memory."""
    return not why_not()


class SharedGroup:
    """The memory of a group; `fd` is for its ranks, which may be other processes (`pass_fds`).

    Args:
        size: ranks.
        room: bytes of a part that is sent at once; the memory is 2 * size * room and some.

    Raises:
        UnsupportedFeatureError: memory cannot be shared here.
    """

    def __init__(self, size: int, room: int = ROOM):
        self._functions = needed_functions()
        room = max(-(-room // STEP), 1) * STEP
        self.size, self.fd = size, -1
        try:
            self.fd = os.memfd_create("minillm-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self._functions.num_bytes(size, room))
            seal_size(self.fd)
            self._memory: mmap.mmap | None = mmap.mmap(self.fd, 0)
        except OSError as error:
            self.close()
            raise refusal(str(error)) from error
        pack_into("qq", self._memory, 0, size, room)

    def communicators(self, patience: float = PATIENCE) -> list["SharedMemoryCommunicator"]:
        """One for each of the ranks, where they are threads of this process."""
        return [SharedMemoryCommunicator(rank, self.fd, patience) for rank in range(self.size)]

    def abort(self) -> None:
        """A rank has ended: the calls in which others wait raise."""
        if self._memory is not None:
            self._functions.abort(address(self._memory))

    def close(self) -> None:
        """Close the file; ranks that have it keep the memory. Closing twice is fine."""
        self._memory = None
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class SharedMemoryCommunicator(Communicator):
    """One rank of a group.

    Args:
        rank: of this process or thread.
        fd: the group's; it may be closed afterwards.
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
        if not 0 <= rank < size or self._functions.num_bytes(size, room) != len(self._memory):
            raise refusal(f"file descriptor {fd} is not that of a group with a rank {rank}")
        super().__init__(rank, size)
        self._has_failed = False

    def add_up(self, part: Tensor) -> None:
        """In C, where it has the dtype."""
        found = functions(part.dtype)
        if isinstance(found, NoLibrary) or not part.is_cpu:
            super().add_up(part)
        else:
            self._call(found.sum, part.data_ptr(), part.numel())

    def exchange(self, part: Tensor) -> Tensor:
        """[..] -> [size, ..]; any dtype."""
        own = part.cpu()
        parts = own.new_empty((self.size, *part.shape))
        self._call(self._functions.gather, own.data_ptr(), own.nbytes, parts.data_ptr())
        return parts.to(part.device)

    def abort(self) -> None:
        """The others' calls raise at once."""
        if self._memory is not None:
            self._functions.abort(address(self._memory))

    def close(self) -> None:
        """Give the memory back, when a call that still waits has ended."""
        self._memory = None

    def _call(self, function: Callable[..., int], *arguments: int) -> None:
        memory = self._memory  # which `close` must not unmap meanwhile
        if memory is None or self._has_failed:
            raise self.stopped()
        report = (c_int64 * self.size)()
        found = function(address(memory), self.rank, *arguments, self.patience, report)
        if found != DONE:
            self._has_failed = True  # the ranks may be in different calls now
            raise self._error(found, list(report))

    def _error(self, found: int, report: list[int]) -> CommunicationError:
        if found == LATE:
            missing = [rank for rank, is_late in enumerate(report) if is_late]
            return self.waited(self.patience, missing)
        if found == UNEQUAL:
            return self.unequal([f"{each // 4} bytes to a {KINDS[each % 4]}" for each in report])
        return self.stopped()


def needed_functions() -> Functions:
    """The functions for float32; UnsupportedFeatureError where memory cannot be shared."""
    reason, found = why_not(), functions()
    if reason or isinstance(found, NoLibrary):
        raise refusal(reason)
    return found


def seal_size(fd: int) -> None:
    """Nobody may shorten the file: a rank that reads behind its end would be killed."""
    import fcntl  # not on all systems

    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def refusal(reason: str) -> UnsupportedFeatureError:
    """Ranks cannot share memory."""
    return UnsupportedFeatureError(f"Ranks cannot share memory here: {reason}; use gloo.")


def address(memory: mmap.mmap) -> int:
    """Where it lies."""
    return addressof(c_char.from_buffer(memory))
