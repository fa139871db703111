"""Busy processes, beside which `minillm bench decode|prefill|offline --beside N` measures.

A busy process runs an empty loop: it uses a processor and almost no memory bandwidth. It is started
before one run of one engine and ended after it. It also ends when the pipe from its parent closes,
so it never outlives the benchmark, even if the benchmark is killed.

Busy processes and engines belong to the benchmark's session: Linux divides a processor first among
sessions (autogroups), then among the threads of each, so an engine in a session of its own would
have another share than one that is started in the same terminal as other programs.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from minillm.errors import ConfigError, MinillmError
from minillm.plan import machine

LOOP = """
import os, sys, threading

def end_with_parent():
    sys.stdin.buffer.read()  # returns when the pipe closes
    os._exit(0)

threading.Thread(target=end_with_parent, daemon=True).start()
print("busy", flush=True)
while True:
    pass
"""
PER_PROCESSOR = 8  # most busy processes per processor: with more, a run takes minutes


class BusyProcessError(MinillmError, RuntimeError):
    """A busy process could not be started."""


def check_count(count: int) -> None:
    """Reject a number of busy processes that this machine could hardly run."""
    most = PER_PROCESSOR * machine.cpu_count()
    if count > most:
        raise ConfigError(
            f"--beside is {count}; it must be a number of busy processes from 1 to {most}, which "
            f"is {PER_PROCESSOR} per processor."
        )


@contextmanager
def busy_processes(count: int) -> Iterator[tuple[int, ...]]:
    """Keep `count` processors busy during the block; yields the process groups."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(start())
        for process in started:
            if not (process.stdout and process.stdout.readline()):
                raise BusyProcessError("A busy process ended at its start; run it again.")
        yield tuple(process.pid for process in started)
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()


def start() -> "subprocess.Popen[bytes]":
    """Start one busy process, in a process group of its own."""
    command = [sys.executable, "-I", "-S", "-c", LOOP]
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, process_group=0)
    except OSError as error:
        raise BusyProcessError(f"A busy process cannot be started: {error}.") from error


def fair_share(threads: int, count: int, processors: int) -> float:
    """The processor time of an engine beside `count` busy processes, over its time alone, if the
    system gives the same time to each of the engine's threads and each busy process."""
    alone = min(threads, processors)
    return threads * min(1.0, processors / (threads + count)) / alone


def report(
    results: Sequence[Mapping[str, Any]],
    idle: Sequence[Mapping[str, Any]],
    threads: int,
    count: int,
) -> dict[str, Any]:
    """JSON data of the runs beside `count` busy processes, each result with its speed over the
    idle speed of the same engine and case."""
    processors = machine.cpu_count()
    share = fair_share(threads, count, processors)
    rows = []
    for one, alone in zip(results, idle, strict=True):
        speeds = [result["tokens_per_second"]["median"] for result in (one, alone)]
        rows.append(
            {**one, "idle_tokens_per_second": speeds[1], "over_idle": speeds[0] / speeds[1]}
        )
    return {
        "processes": count,
        "busy_process": "an empty Python loop",
        "processors": processors,
        "fair_share": share,
        "how": f"The fair share is {share:.0%} of the idle speed: {threads} threads of an engine "
        f"and {count} busy processes share {processors} processors, with the same time for each.",
        "results": rows,
    }
