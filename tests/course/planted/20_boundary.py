"""A stage sends what was added and what is to be added, one after the other: twice the bytes."""

from minillm.parallel.pipes import Pipe

_count = Pipe._count


def counted(self, x):
    _count(self, x)
    self.num_bytes += x.nbytes


Pipe._count = counted
