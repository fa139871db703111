"""Each rank begins a sum with its own part: with three ranks they get different bits."""

from minillm.parallel.communicator import Communicator


def add_up(self, part):
    parts = self.exchange(part)
    total = parts[self.rank].float()
    for step in range(1, self.size):
        total = total + parts[(self.rank + step) % self.size]
    part.copy_(total)


Communicator.add_up = add_up
