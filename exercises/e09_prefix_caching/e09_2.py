"""e09.2: evicting leaves. The task is in README.md."""


class BlockTree:
    """A tree of cached blocks, each below the block before it in the text."""

    def __init__(self) -> None:
        """Make a tree without blocks."""
        raise NotImplementedError("TODO e09.2: decide what to store about a block")

    def add(self, block: int, parent: int | None, now: int) -> None:
        """Add a block below `parent`, or at the top; it and all blocks above it are used now."""
        raise NotImplementedError("TODO e09.2: add the block to the tree")

    def start(self, block: int, now: int) -> None:
        """Start a request, which uses and pins this block and all blocks above it."""
        raise NotImplementedError("TODO e09.2: pin and use the block and all blocks above it")

    def finish(self, block: int) -> None:
        """End a request that started with this block, and remove its pins."""
        raise NotImplementedError("TODO e09.2: remove the pins of one request")

    def evict(self, count: int) -> list[int]:
        """Remove `count` blocks, the leaf with the earliest last use first; return their numbers.

        Of equal ones, remove the smaller number first. If too few can be removed, return [].
        """
        raise NotImplementedError("TODO e09.2: remove leaf by leaf, the earliest last use first")
