"""A pin goes all the way up, so whether it can be done is one sum; a heap does the rest.

Whoever pins a block pins what is above it. So below a block without a pin there is none with one,
and all blocks without pins could go in the end, leaves first: their number says before anything
is removed whether the request for room can be met.

With the uses it is the same: a parent was last used no earlier than its children. So the order of
last use alone would nearly do, were it not for equal times. But a request uses all of a path at
one moment, so equal times are the rule, and only "leaves first" keeps the top of a text in place
until nothing hangs below it.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Node:
    """What is known about a block."""

    parent: int | None
    used: int
    pins: int = 0
    children: int = 0


class BlockTree:
    """A tree of cached blocks, each below the block before it in the text."""

    def __init__(self) -> None:
        """Make a tree without blocks."""
        self.nodes: dict[int, Node] = {}

    def path(self, block: int | None) -> Iterator[Node]:
        """A block and all above it, up to the top."""
        while block is not None:
            node = self.nodes[block]
            yield node
            block = node.parent

    def add(self, block: int, parent: int | None, now: int) -> None:
        """Add a block below `parent`, or at the top; it and all blocks above it are used now."""
        self.nodes[block] = Node(parent, now)
        for node in self.path(parent):
            node.used = now
        if parent is not None:
            self.nodes[parent].children += 1

    def start(self, block: int, now: int) -> None:
        """Start a request, which uses and pins this block and all blocks above it."""
        for node in self.path(block):
            node.used = now
            node.pins += 1

    def finish(self, block: int) -> None:
        """End a request that started with this block, and remove its pins."""
        for node in self.path(block):
            node.pins -= 1

    def evict(self, count: int) -> list[int]:
        """Remove `count` blocks, the leaf with the earliest last use first; return their numbers.

        Of equal ones, remove the smaller number first. If too few can be removed, return [].
        """
        free = {block: node for block, node in self.nodes.items() if node.pins == 0}
        if count > len(free):
            return []
        leaves = [(node.used, block) for block, node in free.items() if node.children == 0]
        heapq.heapify(leaves)
        gone: list[int] = []
        while len(gone) < count:
            block = heapq.heappop(leaves)[1]
            gone.append(block)
            parent = self.nodes.pop(block).parent
            if parent is not None:
                node = self.nodes[parent]
                node.children -= 1
                if node.children == 0 and node.pins == 0:
                    heapq.heappush(leaves, (node.used, parent))
        return gone
