"""The command line: runs a command and turns every error into one sentence.

Exit codes: 0 done, 1 something unexpected, 2 a mistake in what was asked, 130 Ctrl-C, 141 nobody
reads the output any more. Little is imported before `main` runs, so that Ctrl-C is always caught.
"""

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (the entry point ``minillm``)."""
    try:
        from minillm.cli.app import run

        return run(argv)
    except KeyboardInterrupt:
        return report("", 130)
    except BrokenPipeError:
        # Nobody reads the output any more, and Python must not try to flush it at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        return report(*sentence(error))


def sentence(error: Exception) -> tuple[str, int]:
    """What to print for an error, and the exit code."""
    from minillm.errors import MinillmError

    if isinstance(error, MinillmError):
        return f"error: {error}", 2
    what = f"error: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return f"{what} (unexpected: MINILLM_DEBUG=1 shows where, please report it)", 1


def report(message: str, code: int) -> int:
    """Print the last line of a failed command and return its exit code."""
    if os.environ.get("MINILLM_DEBUG"):
        import traceback

        traceback.print_exc()
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    return code
