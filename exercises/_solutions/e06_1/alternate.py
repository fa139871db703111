"""Another way: no countdown. A request that starts at step t with n tokens ends after t + n - 1.

There are two heaps: the free seats, lowest number first, and the ends, by step and seat. A step
looks only at the requests that start or end now, in the order in which they are reported.
"""

import heapq
from collections import deque


class Scheduler:
    """Assigns the seats of a batch to requests in every step."""

    def __init__(self, seats: int) -> None:
        """Make `seats` empty seats and an empty queue."""
        self.sitting: list[str | None] = [None] * seats
        self.free = list(range(seats))  # sorted, so it is a heap
        self.leaving: list[tuple[int, int]] = []  # (last step, seat)
        self.queue: deque[tuple[str, int]] = deque()
        self.now = 0

    def add(self, requests: list[tuple[str, int]]) -> None:
        """Requests arrive; they join the queue in this order."""
        self.queue.extend((name, tokens) for name, tokens in requests)

    def step(self) -> tuple[list[str | None], list[str]]:
        """Return the name in each seat in this step, and the names that ended, by seat."""
        self.now += 1
        while self.free and self.queue:
            seat = heapq.heappop(self.free)
            name, tokens = self.queue.popleft()
            self.sitting[seat] = name
            heapq.heappush(self.leaving, (self.now + tokens - 1, seat))
        seen, ended = list(self.sitting), []
        while self.leaving and self.leaving[0][0] == self.now:
            seat = heapq.heappop(self.leaving)[1]
            ended.append(seen[seat] or "")
            self.sitting[seat] = None
            heapq.heappush(self.free, seat)
        return seen, ended
