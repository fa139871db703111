"""Only the single holder of a block may write into it: this rule is copy-on-write.

The number of holders decides, for both sides. If two sequences share a partly filled block, the
first one to write pays for the copy. The other one is then the only holder and writes in place. So
a fork into n answers costs at most n - 1 copies of one block, however long the prompt is. A full
block is never written again, so it is shared at no cost: if the prompt ends at the border of a
block, there is no copy at all.

All tests come before all changes. A refusal after half of the work would leave blocks that belong
to no table, and a scheduler tries again and again: the pool would lose one block with every
attempt.
"""


class BlockManager:
    """Manages the tables of sequences in `num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """All blocks are free."""
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks))
        self.holders = [0] * num_blocks  # of each block
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}  # tokens of each sequence

    def num_free(self) -> int:
        """Return the number of free blocks."""
        return len(self.free_blocks)

    def table(self, name: str) -> list[int]:
        """The blocks of a sequence, in the order of its text."""
        return list(self.tables[name])

    def allocate(self, name: str, num_tokens: int) -> bool:
        """Begin a sequence with `num_tokens` tokens; return False if they do not fit."""
        if name in self.tables:
            raise ValueError(f"{name!r} is in use")
        count = -(-num_tokens // self.block_size)
        if count > len(self.free_blocks):
            return False
        self.tables[name] = [self._take() for _ in range(count)]
        self.lengths[name] = num_tokens
        return True

    def append(self, name: str) -> tuple[int, int, int | None] | None:
        """Make room for a token; return (block, offset, the block to copy from or None)."""
        if name not in self.tables:
            raise ValueError(f"there is no {name!r}")
        table, offset = self.tables[name], self.lengths[name] % self.block_size
        shared = offset > 0 and self.holders[table[-1]] > 1
        if (offset == 0 or shared) and not self.free_blocks:
            return None
        source = None
        if offset == 0:
            table.append(self._take())
        elif shared:
            source = table[-1]
            self.holders[source] -= 1
            table[-1] = self._take()
        self.lengths[name] += 1
        return table[-1], offset, source

    def fork(self, parent: str, child: str) -> None:
        """Begin the sequence `child` with the tokens of `parent`, in the same blocks."""
        if parent not in self.tables or child in self.tables:
            raise ValueError(f"there is no {parent!r}, or {child!r} is in use")
        self.tables[child] = list(self.tables[parent])
        self.lengths[child] = self.lengths[parent]
        for block in self.tables[parent]:
            self.holders[block] += 1

    def free(self, name: str) -> None:
        """End a sequence; blocks without another holder become free."""
        if name not in self.tables:
            raise ValueError(f"there is no {name!r}")
        for block in self.tables.pop(name):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free_blocks.append(block)

    def _take(self) -> int:
        block = self.free_blocks.pop()
        self.holders[block] = 1
        return block
