"""Admission of requests to the server: a bounded number of unfinished sequences."""

from collections import deque
from math import ceil
from time import perf_counter

from minillm.serving.api_errors import ApiError, overloaded

WINDOW = 64  # latest ends, from which the rate of completed sequences is estimated
LONGEST_WAIT = 60  # seconds that a refused client is asked to wait at most


class Gate:
    """Counts unfinished sequences: a request with 2 prompts and n=3 counts as 6.

    A refused request costs no work in the engine. `Retry-After` is the time until the excess has
    finished, at the rate of the latest sequences.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.num_open = 0
        self.refused = {"max_waiting": 0, "draining": 0}  # requests, by reason
        self.draining = False
        self._ends: deque[tuple[float, int]] = deque(maxlen=WINDOW)

    def enter(self, count: int) -> None:
        """Count `count` sequences, or raise ApiError."""
        if self.draining:
            self.refused["draining"] += 1
            raise overloaded("The server is shutting down; send the request to another one.", 1)
        if count > self.capacity:
            raise ApiError(
                400,
                f"The request has {count} sequences (prompts times n); this server accepts at most "
                f"{self.capacity} at a time, so split it.",
            )
        if self.num_open + count > self.capacity:
            self.refused["max_waiting"] += 1
            raise overloaded(
                f"The server has {self.num_open} unfinished sequences and accepts at most "
                f"{self.capacity}; send the request again later.",
                self.seconds_until(self.num_open + count - self.capacity),
            )
        self.num_open += count

    def leave(self, count: int) -> None:
        """Count the end of `count` sequences."""
        self.num_open -= count
        self._ends.append((perf_counter(), count))

    def seconds_until(self, count: int) -> int:
        """Estimated seconds until `count` more sequences have finished."""
        if len(self._ends) < 2:
            return 1
        seconds = self._ends[-1][0] - self._ends[0][0]
        finished = sum(number for _, number in list(self._ends)[1:])
        return min(max(ceil(count * seconds / max(finished, 1)), 1), LONGEST_WAIT)
