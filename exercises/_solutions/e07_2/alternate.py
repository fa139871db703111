"""Another way: a sequence keeps a queue of the blocks it sees; all entries before them are None.

A table is a run of None followed by the queue, so the number of tokens gives its length. Giving up
blocks means popping at the left until the queue has the right length. A dictionary stores each
block with the names of its holders, and drops it with the last of them.
"""

from collections import deque


class WindowManager:
    """Manages tables in `num_blocks` blocks of `block_size` tokens, for a window of `window`."""

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        """All blocks are free."""
        self.num_blocks, self.size, self.window = num_blocks, block_size, window
        self.held: dict[int, set[str]] = {}  # only blocks that are held
        self.seen: dict[str, deque[int]] = {}
        self.lengths: dict[str, int] = {}

    def num_free(self) -> int:
        """Return the number of free blocks."""
        return self.num_blocks - len(self.held)

    def span(self, length: int) -> tuple[int, int]:
        """The first block that the last of `length` tokens sees, and the one behind the last."""
        return max(length - self.window, 0) // self.size, -(-length // self.size)

    def table(self, name: str) -> list[int | None]:
        """One entry per block of the whole text; None where the window has left."""
        seen = self.seen[name]
        gone = self.span(self.lengths[name])[1] - len(seen)
        return [*[None] * gone, *seen]

    def grow(self, name: str, length: int) -> None:
        """Give a sequence this length: let go at the left, then take at the right."""
        seen, (first, end) = self.seen[name], self.span(length)
        start = self.span(self.lengths[name])[1] - len(seen)  # of what it holds now
        while seen and start < first:
            self.drop(name, seen.popleft())
            start += 1
        while len(seen) < end - first:
            block = next(b for b in range(self.num_blocks) if b not in self.held)
            self.held[block] = {name}
            seen.append(block)
        self.lengths[name] = length

    def drop(self, name: str, block: int) -> None:
        """A sequence holds a block no longer."""
        self.held[block].discard(name)
        if not self.held[block]:
            del self.held[block]

    def allocate(self, name: str, num_tokens: int) -> None:
        """Begin a sequence with a prompt, perhaps beyond the window."""
        self.seen[name], self.lengths[name] = deque(), 0
        self.grow(name, num_tokens)

    def append(self, name: str) -> tuple[int, int]:
        """Add one token; return (block, offset), where the caller writes it."""
        length = self.lengths[name]
        self.grow(name, length + 1)
        return self.seen[name][-1], length % self.size

    def fork(self, parent: str, child: str) -> None:
        """Begin `child` in the blocks of `parent`, whose last block is full."""
        self.seen[child], self.lengths[child] = self.seen[parent].copy(), self.lengths[parent]
        for block in self.seen[child]:
            self.held[block].add(child)

    def free(self, name: str) -> None:
        """End a sequence; blocks without another holder become free."""
        for block in self.seen.pop(name):
            self.drop(name, block)
        del self.lengths[name]
