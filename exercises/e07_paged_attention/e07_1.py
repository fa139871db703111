"""e07.1: block tables with copy-on-write. The task is in README.md."""


class BlockManager:
    """Manages the tables of sequences in `num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Make all blocks free. Given: keep it, or store the tables in another way."""
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks))
        self.holders = [0] * num_blocks  # of each block
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}  # tokens of each sequence

    def num_free(self) -> int:
        """Return the number of free blocks. Given."""
        return len(self.free_blocks)

    def table(self, name: str) -> list[int]:
        """Return the blocks of a sequence, in the order of its text. Given."""
        return list(self.tables[name])

    def allocate(self, name: str, num_tokens: int) -> bool:
        """Begin a sequence with `num_tokens` (at least 0) tokens; return False if they do not fit.

        Raises:
            ValueError: the name is in use.
        """
        raise NotImplementedError("TODO e07.1: take the blocks that the prompt needs, or none")

    def append(self, name: str) -> tuple[int, int, int | None] | None:
        """Make room for a token; return (block, offset, the block to copy from or None).

        Return None, and change nothing, if a block is needed and none is free.

        Raises:
            ValueError: there is no sequence of this name.
        """
        raise NotImplementedError("TODO e07.1: say where the token goes, and what to copy first")

    def fork(self, parent: str, child: str) -> None:
        """Begin the sequence `child` with the tokens of `parent`, in the same blocks.

        Raises:
            ValueError: there is no `parent`, or `child` is in use.
        """
        raise NotImplementedError("TODO e07.1: let both hold the same blocks")

    def free(self, name: str) -> None:
        """End a sequence; blocks without another holder become free.

        Raises:
            ValueError: there is no sequence of this name.
        """
        raise NotImplementedError("TODO e07.1: give up every block of the table")
