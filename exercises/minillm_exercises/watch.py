"""Grading again each time the file is saved.

Saving is noticed by asking for the file's times twice a second, which works on network disks and
with editors that put a new file in the place of the old one; change notifications do neither.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from minillm_exercises.manifest import Exercise

INTERVAL = 0.5  # seconds
ESCAPE = re.compile(r"\x1b(\[[^a-z~]*[a-z~]?|o[a-z])?")  # what an arrow or a function key sends

Signature = tuple[int, int, int] | None
Wait = Callable[[float], str]


def signature(path: Path) -> Signature:
    """What changes when a file is saved; None while it is not there (an editor is replacing it)."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


@contextmanager
def keyboard() -> Iterator[Wait]:
    """A function that waits so many seconds for a key and returns it, or "". Without a terminal
    there are no keys; it only waits."""
    if not sys.stdin.isatty():
        yield _sleep
    elif os.name == "nt":
        yield _windows_key
    else:
        import select
        import termios
        import tty

        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)

        def key(seconds: float) -> str:
            ready, _, _ = select.select([number], [], [], seconds)
            if not ready:
                return ""
            pressed = os.read(number, 32).decode("latin-1").lower()
            return ESCAPE.sub("", pressed)[:1] if pressed else "q"  # "" is a closed terminal

        tty.setcbreak(number)
        try:
            yield key
        finally:
            termios.tcsetattr(number, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _windows_key(seconds: float) -> str:
    import msvcrt

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if msvcrt.kbhit():  # type: ignore[attr-defined]
            return str(msvcrt.getwch()).lower()  # type: ignore[attr-defined]
        time.sleep(0.05)
    return ""


@dataclass
class Watcher:
    """Watches one file after the other until it is stopped.

    `grade` draws the verdict of an exercise, `hint` its next hint, `board` the list of all; `path`
    says where an exercise's file is and begins it if need be; `following` is the exercise to do
    after this one, or None; `say` writes a line, `clear` empties a terminal.
    """

    exercise: Exercise
    grade: Callable[[Exercise], bool]
    hint: Callable[[Exercise], None]
    board: Callable[[], None]
    path: Callable[[Exercise], Path]
    following: Callable[[Exercise], Exercise | None]
    say: Callable[[str], None]
    clear: Callable[[], None]
    passed: bool = field(default=False, init=False)
    missed: int = field(default=0, init=False)  # how often in turn the file was not there

    def watch(self, wait: Wait, keys: bool) -> bool:
        """Grade now and after every save; True if the file passed when it was last graded."""
        try:
            seen = self._grade(keys)
            while (key := wait(INTERVAL)) not in ("q", "\x04"):
                now = signature(self.path(self.exercise))
                self._notice(now)
                if key == "r" or (now is not None and now != seen):
                    seen = self._grade(keys)
                elif key == "n":
                    seen = self._next(keys, seen)
                elif key in ("h", "l"):
                    self._show(key)
        except KeyboardInterrupt:
            pass
        self.say(f"Stopped watching {self.exercise.id}.")
        return self.passed

    def _grade(self, keys: bool) -> Signature:
        """Grade; the signature is taken before, so that a save meanwhile counts as a new one."""
        path = self.path(self.exercise)
        before = signature(path)
        self.clear()
        self.passed = self.grade(self.exercise)
        self.say("")
        if keys:
            self._legend()
        else:
            self.say(f"Watching {path}; Ctrl-C stops.")
        return before

    def _legend(self) -> None:
        following = "n next  " if self.passed else ""
        self.say(f"Watching.  {following}r again  h hint  l list  q quit")

    def _show(self, key: str) -> None:
        """A hint or the list, and the keys below it, where they are still in sight."""
        if key == "h":
            self.hint(self.exercise)
        else:
            self.board()
        self.say("")
        self._legend()

    def _notice(self, now: Signature) -> None:
        """Say once that the file is gone; one look alone may fall between the two steps of an
        editor that replaces it."""
        self.missed = self.missed + 1 if now is None else 0
        if self.missed == 2:
            name = self.path(self.exercise).name
            self.say(f"{name} is gone: save it again, or `start {self.exercise.id}` begins anew.")

    def _next(self, keys: bool, seen: Signature) -> Signature:
        if not self.passed:
            self.say(f"{self.exercise.id} does not pass yet; `start ID` begins another one anyway.")
            return seen
        following = self.following(self.exercise)
        if following is None:
            self.say("Everything that can be done here is done.")
            return seen
        self.exercise = following
        return self._grade(keys)
