"""e06.2: short requests first, with a limit on waiting. The task is in README.md."""


class ShortFirst:
    """A queue that admits the shortest answer first, unless the oldest was overtaken too often."""

    def __init__(self, patience: int) -> None:
        """At most `patience` later arrivals may overtake a request."""
        raise NotImplementedError("TODO e06.2: an empty queue")

    def add(self, name: str, predicted: int) -> int:
        """Add a request; return how many requests may be admitted before it, at most."""
        raise NotImplementedError("TODO e06.2: count the requests that may be admitted before it")

    def admit(self, free: int) -> list[str]:
        """Admit up to `free` requests, one after the other; return their names in this order."""
        raise NotImplementedError(
            "TODO e06.2: the oldest if overtaken too often, otherwise the shortest"
        )
