"""Ctrl-C that cannot get lost.

Python raises KeyboardInterrupt wherever the program happens to be: inside a library that catches
everything, or in a callback or finalizer, where it is printed and dropped. So the handler also
remembers it, `check` raises it again, and a second Ctrl-C before the first was dealt with ends
the process at once.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """A handler of SIGINT that remembers; `pending` until somebody has dealt with it."""

    def __init__(self) -> None:
        self.pending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt in the main thread."""
        if self.pending:
            os._exit(130)
        self.pending = True
        raise KeyboardInterrupt


@contextmanager
def remembered() -> Iterator[Interrupts]:
    """Handle SIGINT meanwhile, unless this process ignores it or somebody else handles it."""
    interrupts, usual = Interrupts(), signal.default_int_handler
    ours = signal.getsignal(signal.SIGINT) is usual
    ours = ours and threading.current_thread() is threading.main_thread()  # no other may
    if ours:
        signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        if ours:
            signal.signal(signal.SIGINT, usual)


def check() -> None:
    """Raise the KeyboardInterrupt that something has swallowed."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interrupts) and handler.pending:
        raise KeyboardInterrupt


def forget() -> None:
    """What Ctrl-C asked for was done, and the program goes on."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interrupts):
        handler.pending = False
