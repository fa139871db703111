"""Another way: without counters, because two numbers tell how often the oldest was overtaken.

Number the requests in the order of arrival. All k requests before the oldest one, number k, have
been admitted. If n have been admitted in all, the other n - k arrived later and overtook it. The
shortest comes from a heap; requests that were admitted as the oldest stay in it until they are on
top.
"""

import heapq


class ShortFirst:
    """A queue that admits the shortest answer first, unless the oldest was overtaken too often."""

    def __init__(self, patience: int) -> None:
        """At most `patience` later arrivals may overtake a request."""
        self.patience = patience
        self.names: list[str] = []  # by number
        self.gone: set[int] = set()
        self.oldest = 0  # the smallest number that is not gone
        self.shortest: list[tuple[int, int]] = []  # (predicted, number)

    def add(self, name: str, predicted: int) -> int:
        """A request arrives: all who wait may go before it, and `patience` later ones."""
        waiting = len(self.names) - len(self.gone)
        heapq.heappush(self.shortest, (predicted, len(self.names)))
        self.names.append(name)
        return waiting + self.patience

    def admit(self, free: int) -> list[str]:
        """Admit up to `free` requests, one after the other; return their names in this order."""
        waiting = len(self.names) - len(self.gone)
        return [self.names[self.next()] for _ in range(min(free, waiting))]

    def next(self) -> int:
        """Take the number of the next request out; somebody waits."""
        if len(self.gone) - self.oldest >= self.patience:
            number = self.oldest
        else:
            while (number := heapq.heappop(self.shortest)[1]) in self.gone:
                pass
        self.gone.add(number)
        while self.oldest in self.gone:
            self.oldest += 1
        return number
