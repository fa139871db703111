"""Latency of all-reduce (sum) and all-gather over two ranks, by communicator and message size.

The ranks are processes with one thread each that call without a pause. A figure is the median of
many calls on rank 0, in microseconds. The thread communicator, which is for tests, is not measured.
"""

import argparse
import json
import platform
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from time import perf_counter

import torch
from torch.distributed import TCPStore

from minillm.cli.terminal import Terminal
from minillm.errors import MinillmError
from minillm.lab.benchmarks.gloo import GlooCommunicator
from minillm.lab.benchmarks.report import benchmark_parser, write_result
from minillm.models.loader import DTYPES
from minillm.parallel.communicator import Communicator
from minillm.parallel.shared_memory import SharedGroup, SharedMemoryCommunicator, why_not
from minillm.parallel.sockets import SocketCommunicator
from minillm.plan.machine import cpu_name

EXAMPLES = """examples:
  python -m minillm.lab.benchmarks.collectives            gloo, sockets, shared memory
  python -m minillm.lab.benchmarks.collectives --calls 1000 --json FILE
  python -m minillm.lab.benchmarks.collectives --calls 3  check that it runs
"""
RANKS = 2
CALLS = ("sum", "gather")
SIZES = (2**12, 2**14, 2**16, 2**18, 2**20, 2**22)  # bytes
SECONDS = 1.0  # limit for one figure
TIMEOUT = 300.0
Rows = list[dict[str, str | int | float]]


def measure(kind: str, calls: int) -> Rows:
    """Start the ranks, and return the measurements of rank 0.

    Raises:
        MinillmError: a rank failed; UnsupportedFeatureError where memory cannot be shared.
    """
    with ExitStack() as stack:
        places, files = meeting_place(kind, stack)
        return run_ranks(kind, calls, places, files)


def meeting_place(kind: str, stack: ExitStack) -> tuple[list[int], list[int]]:
    """For each rank the port or the file by which it finds the others; and the files to inherit."""
    if kind == "gloo":
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stack.callback(lambda: store)  # it serves until the ranks have ended
        return [store.port] * RANKS, []
    if kind == "sockets":
        files = [stack.enter_context(end).fileno() for end in socket.socketpair()]
        return files, files
    group = SharedGroup(RANKS)
    stack.callback(group.close)
    return [group.fd] * RANKS, [group.fd]


def run_ranks(kind: str, calls: int, places: Sequence[int], files: Sequence[int]) -> Rows:
    """Run a process for each rank."""
    running: list[subprocess.Popen[str]] = []
    try:
        for rank in range(RANKS):
            command = [
                sys.executable,
                "-m",
                "minillm.lab.benchmarks.collectives",
                "--calls",
                str(calls),
            ]
            command += ["--rank", f"{kind},{rank},{places[rank]}"]
            pipe = subprocess.PIPE
            running.append(subprocess.Popen(command, stdout=pipe, text=True, pass_fds=files))
        said = [each.communicate(timeout=TIMEOUT)[0] for each in running]
        if any(each.returncode for each in running):
            raise MinillmError(f"A rank over {kind} failed; see its error above.")
        rows: Rows = json.loads(said[0])
        return rows
    finally:
        for each in running:
            each.kill()
            each.wait()


def be_rank(kind: str, rank: int, place: int, calls: int) -> None:
    """Run one rank in this process; rank 0 prints the measurements as JSON."""
    torch.set_num_threads(1)
    communicator: Communicator
    if kind == "gloo":
        store = TCPStore("127.0.0.1", place, is_master=False, wait_for_workers=False)
        communicator = GlooCommunicator(rank, RANKS, store)
    elif kind == "sockets":
        other = socket.socket(fileno=place)
        communicator = SocketCommunicator(rank, [None, other] if rank == 0 else [other, None])
    else:
        communicator = SharedMemoryCommunicator(rank, place)
    found = communicator.gather(torch.tensor([rank])).flatten().tolist()
    if found != list(range(RANKS)):
        raise MinillmError(f"The ranks of {kind} answer as {found}; their order is wrong.")
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


def microseconds(communicator: Communicator, name: str, part: torch.Tensor, calls: int) -> float:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table and JSON."""
    parser = benchmark_parser("collectives", __doc__, EXAMPLES)
    parser.add_argument("--calls", type=int, default=500, help="calls per median (500)")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.calls < 1:
        parser.error(f"--calls is {chosen.calls}; it must be at least 1")
    if chosen.rank:
        kind, rank, place = chosen.rank.split(",")
        be_rank(kind, int(rank), int(place), chosen.calls)
        return 0
    terminal, reason = Terminal(), why_not()
    kinds = ["gloo", "sockets", *([] if reason else ["shared"])]
    rows = [row for kind in kinds for row in measure(kind, chosen.calls)]
    terminal.heading(f"Two ranks: microseconds per call on {cpu_name()}")
    shown = [
        [str(row["kind"]), str(row["dtype"]), f"{int(row['bytes']) // 1024:,}"]
        + [f"{row[call]:,.1f}" for call in CALLS]
        for row in rows
    ]
    terminal.table(["", "", "KB", *CALLS], shown)
    if reason:
        terminal.paragraph(f"Shared memory was not measured: {reason}.")
    result = {
        "benchmark": "collectives",
        "machine": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ranks": RANKS,
        "rows": rows,
    }
    write_result(result, chosen.json, terminal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
