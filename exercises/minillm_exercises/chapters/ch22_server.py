"""`minillm serve` for chapter 22: it ends with the process that has started it.

Its standard input is a pipe from the notebook's kernel. When the kernel ends, however it ends, the
system closes the pipe, and the server stops.
"""

import os
import signal
import sys
import threading
import time

GRACE_SECONDS = 10.0


def end_with_parent() -> None:
    """Wait until the pipe is closed, then stop: with SIGTERM first, as an operator does."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def main() -> int:
    """Serve with the options of the command line, on a port that the system chooses."""
    from minillm.cli import main as minillm

    threading.Thread(target=end_with_parent, daemon=True).start()
    return minillm(["serve", *sys.argv[1:], "--port", "0", "--shutdown-timeout", "0"])


if __name__ == "__main__":
    sys.exit(main())
