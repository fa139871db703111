"""When memory ends, the cached block that was used last is evicted first."""

from itertools import islice

from minillm.cache.blocks import BlockPool

right = BlockPool.allocate


def allocate(self, count):
    if any(block in self._index for block in islice(self._free, count)):
        for block in list(islice(reversed(self._free), count)):
            self._free.move_to_end(block, last=False)
    return right(self, count)


BlockPool.allocate = allocate
