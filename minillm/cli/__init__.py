"""The command line: runs a command and turns every error into one sentence.

Exit codes: 0 done, 1 something unexpected or output that cannot be written, 2 a mistake in what
was asked, 130 Ctrl-C, 141 nobody reads the output any more. Little is imported before `main`
runs, and once it runs, Ctrl-C ends it without a traceback.
"""

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from minillm.cli.interrupt import remembered


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (the entry point ``minillm``)."""
    open_closed_streams()
    share_processors()
    try:
        with remembered() as interrupts:
            try:
                from minillm.cli.app import run

                return run(argv)
            except Exception as error:
                # A library may also turn the interruption into an error of its own.
                return report("", 130) if interrupts.pending else failed(error)
    except KeyboardInterrupt:
        return report("", 130)


def share_processors() -> None:
    """Threads that wait for each other spin a little and then sleep; libgomp reads this when torch
    loads. Its own default spins for so long that beside two busy programs on two processors a
    token of `tiny` took 290 ms instead of 8; on an idle machine sleeping costs 3.3 instead of 3.1.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def open_closed_streams() -> None:
    """Python has None where the caller closed a standard stream (``>&-``); nothing else does."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def failed(error: Exception) -> int:
    """Report an error and return the exit code."""
    from minillm.cli.terminal import OutputError

    if isinstance(error, BrokenPipeError | OutputError):
        discard(sys.stdout)
    if isinstance(error, BrokenPipeError):  # nobody reads the output any more
        return 141
    return report(*sentence(error))


def sentence(error: Exception) -> tuple[str, int]:
    """What to print for an error, and the exit code."""
    from minillm.cli.options import as_options
    from minillm.cli.terminal import OutputError
    from minillm.errors import MinillmError

    if isinstance(error, OutputError):
        return f"error: {error}", 1
    if isinstance(error, MinillmError):
        return f"error: {as_options(str(error))}", 2
    what = f"error: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return f"{what} (unexpected: MINILLM_DEBUG=1 shows where, please report it)", 1


def report(message: str, code: int) -> int:
    """Print the last line of a failed command and return its exit code."""
    try:
        if os.environ.get("MINILLM_DEBUG"):
            import traceback

            traceback.print_exc()
        sys.stderr.write(message + "\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)
    return code


def discard(stream: TextIO) -> None:
    """Lose what a stream cannot write, or Python tries again at the end and fails aloud."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
