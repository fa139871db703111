"""A marker costs one entry and saves an offset.

The first blocks of a long text are gone, and the table still has entries for them. One could remove
the entries and remember their number. But then all code that turns a position into a slot (writing
keys, the attention kernel, the fork) has to subtract it, and code that does not would read the
wrong block without any error. With markers, the division p // block_size stays correct, and a wrong
read finds None.

How many blocks does one sequence hold at most? The `window` tokens overlap the most blocks when the
oldest of them is alone in its block: that block, and those that the other window - 1 tokens fill,
rounded up. A pool of that size is enough for a text of any length, if the old block is given up
before the new one is taken: the first of these blocks leaves in the step in which the last one
begins.
"""


class WindowManager:
    """Manages tables in `num_blocks` blocks of `block_size` tokens, for a window of `window`."""

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        """All blocks are free."""
        self.block_size, self.window = block_size, window
        self.free_blocks = list(range(num_blocks))
        self.holders = [0] * num_blocks  # of each block
        self.tables: dict[str, list[int | None]] = {}
        self.lengths: dict[str, int] = {}  # tokens of each sequence

    def num_free(self) -> int:
        """Return the number of free blocks."""
        return len(self.free_blocks)

    def table(self, name: str) -> list[int | None]:
        """One entry per block of the whole text; None where the window has left."""
        return list(self.tables[name])

    def allocate(self, name: str, num_tokens: int) -> None:
        """Begin a sequence with `num_tokens` (at least 1) tokens, also more than the window."""
        places, unseen = -(-num_tokens // self.block_size), self._unseen(num_tokens)
        self.tables[name] = [None if i < unseen else self._take() for i in range(places)]
        self.lengths[name] = num_tokens

    def append(self, name: str) -> tuple[int, int]:
        """Add one token; return (block, offset), where the caller writes it."""
        table, offset = self.tables[name], self.lengths[name] % self.block_size
        self.lengths[name] += 1
        for place in range(self._unseen(self.lengths[name])):
            self._give_up(table[place])
            table[place] = None
        if offset == 0:
            table.append(self._take())
        block = table[-1]
        return block, offset

    def fork(self, parent: str, child: str) -> None:
        """Begin `child` in the blocks of `parent`, whose last block is full."""
        self.tables[child] = list(self.tables[parent])
        self.lengths[child] = self.lengths[parent]
        for block in self.tables[parent]:
            if block is not None:
                self.holders[block] += 1

    def free(self, name: str) -> None:
        """End a sequence; blocks without another holder become free."""
        for block in self.tables.pop(name):
            self._give_up(block)

    def _unseen(self, length: int) -> int:
        """How many first blocks of a text the newest of `length` tokens does not see."""
        return max(0, length - self.window) // self.block_size

    def _take(self) -> int:
        block = self.free_blocks.pop()
        self.holders[block] = 1
        return block

    def _give_up(self, block: int | None) -> None:
        if block is None:
            return
        self.holders[block] -= 1
        if self.holders[block] == 0:
            self.free_blocks.append(block)
