"""Another way: only the tables are stored. A block is free if it is in none of them.

So no count can be wrong: `free` forgets a table, `fork` writes a second one, and free and shared
blocks are found by looking at all tables. A real pool has too many blocks for that.
"""

from collections import Counter


class BlockManager:
    """Manages the tables of sequences in `num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """No sequences, so all blocks are free."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.books: dict[str, tuple[int, tuple[int, ...]]] = {}  # tokens and table of a sequence

    def holders(self) -> Counter[int]:
        """How many tables each block is in."""
        return Counter(block for _, table in self.books.values() for block in table)

    def spare(self) -> list[int]:
        """The free blocks, the largest number first."""
        held = self.holders()
        return [block for block in reversed(range(self.num_blocks)) if block not in held]

    def num_free(self) -> int:
        """Return the number of free blocks."""
        return len(self.spare())

    def table(self, name: str) -> list[int]:
        """The blocks of a sequence, in the order of its text."""
        return list(self.books[name][1])

    def allocate(self, name: str, num_tokens: int) -> bool:
        """Begin a sequence with a prompt of `num_tokens`; False if it does not fit."""
        self.check(unused=name)
        needed, spare = -(-num_tokens // self.block_size), self.spare()
        if needed > len(spare):
            return False
        self.books[name] = num_tokens, tuple(spare[:needed])
        return True

    def append(self, name: str) -> tuple[int, int, int | None] | None:
        """Make room for a token; return (block, offset, the block to copy from or None)."""
        self.check(used=name)
        length, table = self.books[name]
        offset = length % self.block_size
        if offset and self.holders()[table[-1]] == 1:
            self.books[name] = length + 1, table
            return table[-1], offset, None
        spare = self.spare()
        if not spare:
            return None
        kept, source = (table[:-1], table[-1]) if offset else (table, None)
        self.books[name] = length + 1, (*kept, spare[0])
        return spare[0], offset, source

    def fork(self, parent: str, child: str) -> None:
        """Begin the sequence `child` with the tokens of `parent`, in the same blocks."""
        self.check(used=parent, unused=child)
        self.books[child] = self.books[parent]

    def free(self, name: str) -> None:
        """End a sequence; blocks without another holder become free."""
        self.check(used=name)
        del self.books[name]

    def check(self, used: str | None = None, unused: str | None = None) -> None:
        """Raise ValueError unless one name is in use and the other is not."""
        if used is not None and used not in self.books:
            raise ValueError(f"There is no sequence {used!r}.")
        if unused is not None and unused in self.books:
            raise ValueError(f"The name {unused!r} is in use.")
