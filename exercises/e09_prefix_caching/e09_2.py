"""e09.2: evicting leaves. The task is in README.md."""


class BlockTree:
    """Cached blocks, each below the block before it in the text, and the order in which they go."""

    def __init__(self) -> None:
        """No blocks."""
        raise NotImplementedError("TODO e09.2: what has to be known about a block?")

    def add(self, block: int, parent: int | None, now: int) -> None:
        """A new block below `parent`, or at the top; it and all above it are used now."""
        raise NotImplementedError("TODO e09.2: hang the block into the tree")

    def start(self, block: int, now: int) -> None:
        """A request starts: it uses this block and all above it now, and pins them."""
        raise NotImplementedError("TODO e09.2: pin and use the block and all above it")

    def finish(self, block: int) -> None:
        """A request that was started with this block has ended: its pins go."""
        raise NotImplementedError("TODO e09.2: take the pins of one request away")

    def evict(self, count: int) -> list[int]:
        """Remove `count` blocks, the leaf used longest ago first; their numbers, in this order.

        The smaller number goes first of equal ones. If so many cannot go, none does: [].
        """
        raise NotImplementedError("TODO e09.2: leaf by leaf, the longest unused first")
