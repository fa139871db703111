"""e06.2: short ones first, and nobody starves. The task is in README.md."""


class ShortFirst:
    """A queue: the shortest predicted answer first, until the oldest was overtaken too often."""

    def __init__(self, patience: int) -> None:
        """At most `patience` later arrivals may overtake a request."""
        raise NotImplementedError("TODO e06.2: an empty queue")

    def add(self, name: str, predicted: int) -> int:
        """A request arrives; the largest number of requests that can be admitted before it."""
        raise NotImplementedError("TODO e06.2: who may still be admitted before it?")

    def admit(self, free: int) -> list[str]:
        """Admit up to `free` requests, one after the other; their names in this order."""
        raise NotImplementedError("TODO e06.2: the oldest out of patience, or else the shortest")
