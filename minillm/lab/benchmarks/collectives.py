"""Latency of all-reduce (sum) and all-gather over two ranks, by communicator and message size.

The ranks are processes with one thread each (``python -m minillm.lab.benchmarks.collectives KIND
RANK PLACE CALLS``) that call without a pause. A figure is the median of many calls on rank 0, in
microseconds. Gloo is PyTorch's CPU backend, for comparison. The thread communicator, which is for
tests, is not measured.
"""

import json
import socket
import subprocess
import sys
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, distributed

from minillm.errors import MinillmError
from minillm.models.loader import DTYPES
from minillm.parallel.shared_memory import SharedGroup, SharedMemoryCommunicator
from minillm.parallel.sockets import SocketCommunicator

RANKS = 2
CALLS = ("sum", "gather")
SIZES = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22)  # bytes
SECONDS = 1.0  # limit for one figure
TIMEOUT = 300.0
Rows = list[dict[str, str | int | float]]


class Gloo:
    """A rank of PyTorch's CPU backend, with the calls of a `Communicator`."""

    def __init__(self, rank: int, port: int):
        store = distributed.TCPStore("127.0.0.1", port, is_master=False)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)

    def sum(self, part: Tensor) -> Tensor:
        """All-reduce, in place."""
        distributed.all_reduce(part)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """[..] -> [ranks, ..]"""
        received = part.new_empty((RANKS, *part.shape))
        distributed.all_gather(list(received.unbind(0)), part)
        return received

    def close(self) -> None:
        """End the group."""
        distributed.destroy_process_group()


def measure(kind: str, calls: int) -> Rows:
    """Run a process for each rank, and return the measurements of rank 0.

    Raises:
        MinillmError: a rank failed; UnsupportedFeatureError where memory cannot be shared.
    """
    with ExitStack() as stack:
        places, files = meeting_place(kind, stack)
        running = []
        for rank, place in enumerate(places):
            command = [sys.executable, "-m", "minillm.lab.benchmarks.collectives", kind]
            command += [str(rank), str(place), str(calls)]
            one = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=files)
            stack.callback(one.wait)
            stack.callback(one.kill)
            running.append(one)
        said = [sequence.communicate(timeout=TIMEOUT)[0] for sequence in running]
        if any(sequence.returncode for sequence in running):
            raise MinillmError(f"A rank over {kind} failed; see its error above.")
        rows: Rows = json.loads(said[0])
        return rows


def meeting_place(kind: str, stack: ExitStack) -> tuple[list[int], list[int]]:
    """For each rank the port or the file by which it finds the others; and the files to inherit."""
    if kind == "gloo":
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stack.callback(lambda: store)  # it serves until the ranks have ended
        return [store.port] * RANKS, []
    if kind == "sockets":
        files = [stack.enter_context(end).fileno() for end in socket.socketpair()]
        return files, files
    group = SharedGroup(RANKS)
    stack.callback(group.close)
    return [group.fd] * RANKS, [group.fd]


def main(kind: str, rank: int, place: int, calls: int) -> None:
    """Run one rank in this process; rank 0 prints the measurements as JSON."""
    torch.set_num_threads(1)
    communicator: Any
    if kind == "gloo":
        communicator = Gloo(rank, place)
    elif kind == "sockets":
        other = socket.socket(fileno=place)
        communicator = SocketCommunicator(rank, [None, other] if rank == 0 else [other, None])
    else:
        communicator = SharedMemoryCommunicator(rank, place)
    ranks = communicator.gather(torch.tensor([rank])).flatten().tolist()
    if ranks != list(range(RANKS)):
        raise MinillmError(f"The ranks of {kind} answer as {ranks}; their order is wrong.")
    rows: Rows = []
    for name in ("float32", "bfloat16"):
        for num_bytes in SIZES:
            part = torch.zeros(num_bytes // DTYPES[name].itemsize, dtype=DTYPES[name])
            times = {call: microseconds(communicator, call, part, calls) for call in CALLS}
            rows.append({"kind": kind, "dtype": name, "bytes": num_bytes} | times)
    if rank == 0:
        sys.stdout.write(json.dumps(rows))
        sys.stdout.flush()
    communicator.sum(torch.zeros(1))  # a barrier: no rank closes while another is still measuring
    communicator.close()


def microseconds(communicator: Any, name: str, part: Tensor, calls: int) -> float:
    """The median of some calls, in microseconds; rank 0 decides the number of calls."""
    call = getattr(communicator, name)
    begin = perf_counter()
    for _ in range(3):
        call(part)
    fitting = int(SECONDS / max((perf_counter() - begin) / 3, 1e-9))
    calls = min(calls, max(int(communicator.gather(torch.tensor([fitting]))[0]), 3))
    seconds = []
    for _ in range(calls):
        begin = perf_counter()
        call(part)
        seconds.append(perf_counter() - begin)
    return round(median(seconds) * 1e6, 2)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
