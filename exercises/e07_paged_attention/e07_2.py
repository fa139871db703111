"""e07.2: block tables of sequences that look back over a window only. The task is in README.md."""


class WindowManager:
    """`num_blocks` blocks of `block_size` tokens; nobody looks back over more than `window`."""

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        """All blocks are free. Given: keep it, or keep your books in another way."""
        self.block_size, self.window = block_size, window
        self.free_blocks = list(range(num_blocks))
        self.holders = [0] * num_blocks  # of each block
        self.tables: dict[str, list[int | None]] = {}
        self.lengths: dict[str, int] = {}  # tokens of each sequence

    def num_free(self) -> int:
        """How many blocks nobody holds. Given."""
        return len(self.free_blocks)

    def table(self, name: str) -> list[int | None]:
        """One entry per block of the whole text; None where the window has left. Given."""
        return list(self.tables[name])

    def allocate(self, name: str, num_tokens: int) -> None:
        """Begin a sequence with a prompt of `num_tokens`, at least 1, perhaps beyond the window."""
        raise NotImplementedError("TODO e07.2: take blocks for what the newest token sees")

    def append(self, name: str) -> tuple[int, int]:
        """Add one token: (block, offset) where it has to be written."""
        raise NotImplementedError("TODO e07.2: let go of what it does not see, then make room")

    def fork(self, parent: str, child: str) -> None:
        """Begin `child` with the tokens of `parent`, whose last block is full, in its blocks."""
        raise NotImplementedError("TODO e07.2: let both hold the same blocks")

    def free(self, name: str) -> None:
        """End a sequence: what nobody else holds becomes free."""
        raise NotImplementedError("TODO e07.2: give up every block that is still held")
