"""Grading again each time the file is saved.

Saving is noticed by asking for the file's times twice a second, which works on network disks and
with editors that put a new file in the place of the old one; change notifications do neither.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

INTERVAL = 0.5  # seconds

Signature = tuple[int, int, int] | None


def signature(path: Path) -> Signature:
    """What changes when a file is saved; None while it is not there (an editor is replacing it)."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def watch(
    path: Path,
    grade: Callable[[], bool],
    gone: Callable[[], None],
    wait: Callable[[float], object] = time.sleep,
) -> bool:
    """Grade now and after every save until Ctrl-C; True if the file passed when it was last graded.

    `gone` is called once when the file has been missing for two looks: one look alone may fall
    between the two steps of an editor that replaces it.
    """
    seen: Signature = None
    passed, missed = False, 0
    try:
        while True:
            now = signature(path)  # before grading: a save meanwhile counts as a new one
            missed = missed + 1 if now is None else 0
            if missed == 2:
                gone()
            if now not in (None, seen):
                passed, seen = grade(), now
            wait(INTERVAL)
    except KeyboardInterrupt:
        return passed
