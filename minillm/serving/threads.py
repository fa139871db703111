"""How the threads of a server's process share the interpreter, and their names."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SWITCH_SECONDS = 0.0001
THIS_THREAD = Path("/proc/thread-self/comm")


@contextmanager
def quick_switches() -> Iterator[None]:
    """Context in which a thread that waits for the interpreter gets it after `SWITCH_SECONDS`.

    The step thread gives the interpreter up for each C function, and needs it back afterwards.
    Writing one event to each of 64 streams takes the event loop about 3 ms. With Python's default
    of 5 ms the step would wait for all of it, with both cores idle.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def show_name() -> None:
    """Give the calling thread its Python name in ``top -H`` and ``perf``, as Python 3.14 does. Does
    nothing where the system is not Linux."""
    with suppress(OSError):
        THIS_THREAD.write_text(threading.current_thread().name)
