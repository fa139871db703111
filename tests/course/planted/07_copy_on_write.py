"""Nothing is copied: who writes into a shared block writes into everybody's."""

from minillm.cache.manager import BlockManager

BlockManager._must_copy = lambda self, table, start: False
