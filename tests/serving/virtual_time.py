"""An event loop whose clock jumps to the next timer as soon as no socket has data.

Client and server run in the same loop and connect over the loopback interface, where data arrives
at once. All times are therefore exact and independent of the load of the machine.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

GRACE = 0.001  # real seconds for data on the loopback interface
HANG = 20.0  # real seconds without an event or a timer


class JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, adds the time to the clock."""

    def __init__(self, grace: float) -> None:
        super().__init__()
        self.grace, self.now = grace, 100.0

    def select(self, timeout: float | None = None) -> Any:
        """Events, or nothing after the clock has jumped."""
        events = super().select(0)
        if events or timeout == 0:
            return events
        events = super().select(HANG if timeout is None else self.grace)
        if not events:
            assert timeout is not None, "the loop waits for an event that never comes"
            self.now += max(timeout, 0.0)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop on the clock of its selector."""

    def __init__(self, grace: float = GRACE) -> None:
        self.jumping = JumpingSelector(grace)
        super().__init__(self.jumping)

    def time(self) -> float:
        """The virtual time in seconds."""
        return self.jumping.now


def run_virtual(main: Coroutine[Any, Any, Any], grace: float = GRACE) -> Any:
    """Run a coroutine in a new virtual loop; without sockets, `grace` may be 0."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(grace)) as runner:
        return runner.run(main)
