"""You count every admission: a request that came earlier overtakes nobody who came later."""

from dataclasses import dataclass


@dataclass
class Waiting:
    """A request in the queue; `overtaken` counts the later arrivals admitted before it."""

    name: str
    predicted: int
    overtaken: int = 0


class ShortFirst:
    """A queue: the shortest predicted answer first, until the oldest was overtaken too often."""

    def __init__(self, patience: int) -> None:
        """At most `patience` later arrivals may overtake a request."""
        self.patience = patience
        self.queue: list[Waiting] = []  # oldest first

    def add(self, name: str, predicted: int) -> int:
        """A request arrives; the largest number of requests that can be admitted before it."""
        promise = len(self.queue) + self.patience
        self.queue.append(Waiting(name, predicted))
        return promise

    def admit(self, free: int) -> list[str]:
        """Admit up to `free` requests, one after the other; their names in this order."""
        admitted: list[str] = []
        while self.queue and len(admitted) < free:
            place = self._next()
            for earlier in self.queue:
                earlier.overtaken += 1
            admitted.append(self.queue.pop(place).name)
        return admitted

    def _next(self) -> int:
        """The place in the queue of who is admitted next."""
        if self.queue[0].overtaken >= self.patience:
            return 0
        return min(range(len(self.queue)), key=lambda place: self.queue[place].predicted)
