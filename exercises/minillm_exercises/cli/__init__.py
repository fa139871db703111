"""The command line of the exercises: ``python -m minillm_exercises COMMAND``.

Exit codes: 0 passed or done, 1 not yet, 2 an invalid command, 130 Ctrl-C, 141 the reader
of the output has gone.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from minillm.cli import discard, open_closed_streams

if TYPE_CHECKING:
    from minillm_exercises.cli.app import App


def main(argv: Sequence[str] | None = None, app: "App | None" = None) -> int:
    """Run one command and return its exit code."""
    open_closed_streams()
    try:
        from minillm_exercises.cli.app import run  # rich takes a moment: not before Ctrl-C works

        return run(argv, app)
    except KeyboardInterrupt:
        return _say("", 130)
    except BrokenPipeError:
        discard(sys.stdout)
        return 141
    except ModuleNotFoundError as error:
        return _say(f"error: {_missing(error)}", 2)
    except Exception as error:
        from minillm.errors import MinillmError

        if isinstance(error, MinillmError):
            return _say(f"error: {error}", 2)
        if os.environ.get("MINILLM_DEBUG"):
            raise
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return _say(f"error: {what} (unexpected: MINILLM_DEBUG=1 shows where)", 1)


def _missing(error: ModuleNotFoundError) -> str:
    if error.name == "rich":
        return (
            "the course's packages are not installed: run `make lab` once, or "
            "pip install -c constraints.txt -e '.[course]'."
        )
    return f"{error}; install it into {sys.executable}."


def _say(message: str, code: int) -> int:
    try:
        sys.stderr.write(message + "\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)
    return code
