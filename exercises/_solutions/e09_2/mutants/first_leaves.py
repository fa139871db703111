"""You only look at blocks that are leaves at first: a parent becomes one in the same call."""

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
    """Cached blocks, each below the block before it in the text, and the order in which they go."""

    def __init__(self) -> None:
        """No blocks."""
        self.nodes: dict[int, Node] = {}

    def path(self, block: int | None) -> Iterator[Node]:
        """A block and all above it, up to the top."""
        while block is not None:
            node = self.nodes[block]
            yield node
            block = node.parent

    def add(self, block: int, parent: int | None, now: int) -> None:
        """A new block below `parent`, or at the top; it and all above it are used now."""
        self.nodes[block] = Node(parent, now)
        for node in self.path(parent):
            node.used = now
        if parent is not None:
            self.nodes[parent].children += 1

    def start(self, block: int, now: int) -> None:
        """A request starts: it uses this block and all above it now, and pins them."""
        for node in self.path(block):
            node.used = now
            node.pins += 1

    def finish(self, block: int) -> None:
        """A request that was started with this block has ended: its pins go."""
        for node in self.path(block):
            node.pins -= 1

    def evict(self, count: int) -> list[int]:
        """Remove `count` blocks, the leaf used longest ago first; their numbers, in this order.

        The smaller number goes first of equal ones. If so many cannot go, none does: [].
        """
        free = {block: node for block, node in self.nodes.items() if node.pins == 0}
        if count > len(free):
            return []
        leaves = [(node.used, block) for block, node in free.items() if node.children == 0]
        if count > len(leaves):
            return []
        heapq.heapify(leaves)
        gone: list[int] = []
        while len(gone) < count:
            block = heapq.heappop(leaves)[1]
            gone.append(block)
            parent = self.nodes.pop(block).parent
            if parent is not None:
                node = self.nodes[parent]
                node.children -= 1
        return gone
