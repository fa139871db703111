"""Three loops over the seats, in this order: fill the free seats, make tokens, empty seats.

The first result is a copy of the seats between the first and the last loop, when every request that
makes a token is in its seat. A seat that becomes empty in the last loop is taken in the first loop
of the next step. This is iteration-level scheduling (Yu et al., "Orca", 2022), and the only
difference from a static batch, which fills its seats only when all of them are empty.

There is no early return. The published scheduler returned an empty list when no request was left,
and so did not report the requests that had ended in this very step.
"""

from collections import deque


class Scheduler:
    """Assigns the seats of a batch to requests in every step."""

    def __init__(self, seats: int) -> None:
        """Make `seats` empty seats and an empty queue."""
        self.seats: list[str | None] = [None] * seats
        self.left: dict[str, int] = {}  # tokens still to make
        self.queue: deque[tuple[str, int]] = deque()

    def add(self, requests: list[tuple[str, int]]) -> None:
        """Append requests (name, tokens to make) to the queue, in this order."""
        self.queue.extend(requests)

    def step(self) -> tuple[list[str | None], list[str]]:
        """Return the name in each seat in this step, and the names that ended, by seat."""
        for seat, name in enumerate(self.seats):
            if name is None and self.queue:
                first, tokens = self.queue.popleft()
                self.seats[seat] = first
                self.left[first] = tokens
        running = list(self.seats)
        ended = []
        for seat, name in enumerate(running):
            if name is not None:
                self.left[name] -= 1
                if self.left[name] == 0:
                    ended.append(name)
                    self.seats[seat] = None
        return running, ended
