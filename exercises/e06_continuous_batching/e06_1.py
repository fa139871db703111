"""e06.1: one step of a scheduler. The task is in README.md."""


class Scheduler:
    """Assigns the seats of a batch to requests in every step."""

    def __init__(self, seats: int) -> None:
        """Make `seats` empty seats and an empty queue."""
        raise NotImplementedError("TODO e06.1: empty seats and an empty queue")

    def add(self, requests: list[tuple[str, int]]) -> None:
        """Append requests (name, tokens to make) to the queue, in this order."""
        raise NotImplementedError("TODO e06.1: append the requests to the queue")

    def step(self) -> tuple[list[str | None], list[str]]:
        """Return the name in each seat in this step, and the names that ended, by seat."""
        raise NotImplementedError(
            "TODO e06.1: fill the free seats, make tokens, find the ended requests"
        )
