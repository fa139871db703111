"""You take the old entries out of the table: then p // block_size finds another block."""


class WindowManager:
    """`num_blocks` blocks of `block_size` tokens; nobody looks back over more than `window`."""

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        """All blocks are free."""
        self.block_size, self.window = block_size, window
        self.free_blocks = list(range(num_blocks))
        self.holders = [0] * num_blocks  # of each block
        self.tables: dict[str, list[int | None]] = {}
        self.lengths: dict[str, int] = {}  # tokens of each sequence

    def num_free(self) -> int:
        """How many blocks nobody holds."""
        return len(self.free_blocks)

    def table(self, name: str) -> list[int | None]:
        """One entry per block of the whole text; None where the window has left."""
        return list(self.tables[name])

    def allocate(self, name: str, num_tokens: int) -> None:
        """Begin a sequence with a prompt of `num_tokens`, at least 1, perhaps beyond the window."""
        places, unseen = -(-num_tokens // self.block_size), self._unseen(num_tokens)
        self.tables[name] = [None if i < unseen else self._take() for i in range(places)]
        self.lengths[name] = num_tokens

    def append(self, name: str) -> tuple[int, int]:
        """Add one token: (block, offset) where it has to be written."""
        table, offset = self.tables[name], self.lengths[name] % self.block_size
        self.lengths[name] += 1
        if self._unseen(self.lengths[name]) > self._unseen(self.lengths[name] - 1):
            self._give_up(table.pop(0))
        if offset == 0:
            table.append(self._take())
        block = table[-1]
        return block, offset

    def fork(self, parent: str, child: str) -> None:
        """Begin `child` with the tokens of `parent`, whose last block is full, in its blocks."""
        self.tables[child] = list(self.tables[parent])
        self.lengths[child] = self.lengths[parent]
        for block in self.tables[parent]:
            if block is not None:
                self.holders[block] += 1

    def free(self, name: str) -> None:
        """End a sequence: what nobody else holds becomes free."""
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
