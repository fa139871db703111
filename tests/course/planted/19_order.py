"""Each rank begins a sum with its own part: with three ranks they get different bits."""

from minillm.parallel.communicator import Communicator


def add_up(self, part):
    self._count("sum", part)
    parts = self.exchange(part)
    total = parts[self.rank].float()
    for step in range(1, self.size):
        total = total + parts[(self.rank + step) % self.size]
    return part.copy_(total)


Communicator.sum = add_up
