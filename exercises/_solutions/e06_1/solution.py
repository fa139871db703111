"""Three loops over the seats, in this order: sit down, make a token, stand up.

The first result is a copy of the seats between the first loop and the last, which is when everybody
who makes a token sits there. A seat that becomes empty in the last loop is taken in the first loop
of the next step: that is all of iteration-level scheduling (Yu et al., "Orca", 2022), and the only
difference from a static batch, which would sit down only when all seats are empty.

No case leaves early. The published scheduler returned an empty list as soon as nobody was left
running, and so forgot those who had ended in this very step.
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
