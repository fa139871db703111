"""Handles Ctrl-C even when a library swallows the KeyboardInterrupt.

A library may catch KeyboardInterrupt, and Python drops it in callbacks and finalizers. The handler
therefore also records it; `check` raises it again. A second Ctrl-C while the first is pending ends
the process at once.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """A SIGINT handler; `pending` is True from Ctrl-C until `forget`."""

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
    """Install the handler for the block, unless SIGINT is ignored or has another handler."""
    interrupts, usual = Interrupts(), signal.default_int_handler
    ours = signal.getsignal(signal.SIGINT) is usual
    # Python allows only the main thread to set a signal handler.
    ours = ours and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        if ours:
            signal.signal(signal.SIGINT, usual)


def check() -> None:
    """Raise KeyboardInterrupt if one is pending."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interrupts) and handler.pending:
        raise KeyboardInterrupt


def forget() -> None:
    """Clear the pending interrupt, after Ctrl-C was handled and the program continues."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interrupts):
        handler.pending = False
