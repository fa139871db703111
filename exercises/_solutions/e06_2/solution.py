"""A list in the order of arrival, and a counter per request.

When the request at some place of the list is admitted, exactly the requests before that place are
overtaken: they arrived earlier and still wait. So the counters never increase from the front of the
list to its end, and the first one shows whether any request has reached its limit.

The promise holds for the same reason. The waiting requests can be admitted once each, and at most
`patience` of the later ones overtake this request: before one more could, either this request is
the oldest and is next, or an older one is at its limit and is next. Shortest first alone promises
nothing. First come, first served promises the number of waiting requests. So `patience` is the
number of places that a long request loses at most, so that the short ones wait less.

In real serving, lengths have to be predicted. Predicting their order is enough (Fu et al.,
"Efficient LLM Scheduling by Learning to Rank", 2024), and the promise holds for any prediction.
"""

from dataclasses import dataclass


@dataclass
class Waiting:
    """A request in the queue; `overtaken` counts the later arrivals admitted before it."""

    name: str
    predicted: int
    overtaken: int = 0


class ShortFirst:
    """A queue that admits the shortest answer first, unless the oldest was overtaken too often."""

    def __init__(self, patience: int) -> None:
        """At most `patience` later arrivals may overtake a request."""
        self.patience = patience
        self.queue: list[Waiting] = []  # oldest first

    def add(self, name: str, predicted: int) -> int:
        """Add a request; return how many requests may be admitted before it, at most."""
        promise = len(self.queue) + self.patience
        self.queue.append(Waiting(name, predicted))
        return promise

    def admit(self, free: int) -> list[str]:
        """Admit up to `free` requests, one after the other; return their names in this order."""
        admitted: list[str] = []
        while self.queue and len(admitted) < free:
            place = self._next()
            for earlier in self.queue[:place]:
                earlier.overtaken += 1
            admitted.append(self.queue.pop(place).name)
        return admitted

    def _next(self) -> int:
        """The place in the queue of who is admitted next."""
        if self.queue[0].overtaken >= self.patience:
            return 0
        return min(range(len(self.queue)), key=lambda place: self.queue[place].predicted)
