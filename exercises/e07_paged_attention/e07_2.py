"""e07.2: block tables for a sliding window. The task is in README.md."""


class WindowManager:
    """Manages tables in `num_blocks` blocks of `block_size` tokens, for a window of `window`."""

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        """Make all blocks free. Given: keep it, or store the tables in another way."""
        self.block_size, self.window = block_size, window
        self.free_blocks = list(range(num_blocks))
        self.holders = [0] * num_blocks  # of each block
        self.tables: dict[str, list[int | None]] = {}
        self.lengths: dict[str, int] = {}  # tokens of each sequence

    def num_free(self) -> int:
        """Return the number of free blocks. Given."""
        return len(self.free_blocks)

    def table(self, name: str) -> list[int | None]:
        """Return one entry per block of the text; None before the window. Given."""
        return list(self.tables[name])

    def allocate(self, name: str, num_tokens: int) -> None:
        """Begin a sequence with `num_tokens` (at least 1) tokens, also more than the window."""
        raise NotImplementedError(
            "TODO e07.2: take blocks for the positions that the newest token sees"
        )

    def append(self, name: str) -> tuple[int, int]:
        """Add one token; return (block, offset), where the caller writes it."""
        raise NotImplementedError(
            "TODO e07.2: give up the blocks before the window, then make room"
        )

    def fork(self, parent: str, child: str) -> None:
        """Begin `child` in the blocks of `parent`, whose last block is full."""
        raise NotImplementedError("TODO e07.2: let both hold the same blocks")

    def free(self, name: str) -> None:
        """End a sequence; blocks without another holder become free."""
        raise NotImplementedError("TODO e07.2: give up every block that is still held")
