"""What is written to slow memory is not counted, as if only reading moved anything."""

from minillm_exercises.chapters.ch10 import Slow

_write = Slow.write


def write(self, name, tile, rows=slice(None)):
    before = self.of.copy()
    _write(self, name, tile, rows)
    self.of = before


Slow.write = write
