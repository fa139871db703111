"""e06.1: one step of a scheduler. The task is in README.md."""


class Scheduler:
    """Gives the seats of a batch to requests, anew in every step."""

    def __init__(self, seats: int) -> None:
        """So many requests can run in one step; nobody is there yet."""
        raise NotImplementedError("TODO e06.1: empty seats and an empty queue")

    def add(self, requests: list[tuple[str, int]]) -> None:
        """Requests arrive, as (name, tokens to make); they join the queue in this order."""
        raise NotImplementedError("TODO e06.1: they queue behind those who wait already")

    def step(self) -> tuple[list[str | None], list[str]]:
        """Who makes a token in each seat in this step, and who ended with it, by seat."""
        raise NotImplementedError("TODO e06.1: fill the free seats, make tokens, see who ends")
