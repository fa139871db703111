"""Prefix cache as a tree (RadixAttention; Zheng et al., 2024): one edge per block of tokens.

              root of a salt
              /            \\
        [1 2 3 4]        [1 2 9 9]       a prompt 1 2 3 5 ... shares no whole block with either,
         /     \\                         but 3 of its tokens are in the block of [1 2 3 4]: they
    [5 6 7 8]  [5 6 0 0]                 are reused by copying that block

Against the hash chain: it finds the longest common start to the token and not to the block, for
a comparison instead of a hash per block; and where it forgets a block, it forgets what follows.
Chains of only children are not merged into one edge, because blocks are counted one by one anyway.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from minillm.cache.prefix import Match

ROOT_BLOCK = -1


class Node:
    """A block after the blocks above it. Children are also kept in order of their tokens, because
    the longest common start with any list of tokens is then beside the place where it would be."""

    __slots__ = ("block", "children", "order", "parent", "salt", "token_ids")

    def __init__(self, block: int, token_ids: tuple[int, ...], parent: "Node | None", salt: str):
        self.block, self.token_ids, self.parent, self.salt = block, token_ids, parent, salt
        self.children: dict[tuple[int, ...], Node] = {}
        self.order: list[tuple[int, ...]] = []

    def add(self, child: "Node") -> None:
        """Put a child under this node."""
        self.children[child.token_ids] = child
        insort(self.order, child.token_ids)

    def remove(self, child: "Node") -> None:
        """Take a child away."""
        del self.children[child.token_ids]
        del self.order[bisect_left(self.order, child.token_ids)]


class Overlap(NamedTuple):
    """A block that begins with the tokens one looks for, and with how many of them."""

    block: int | None
    num_tokens: int


class RadixTree:
    """A cursor is the node of the block before it."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.lost: list[int] = []
        self._roots: dict[str, Node] = {}  # only those that have children
        self._nodes: dict[int, Node] = {}  # by block

    def start(self, salt: str) -> Node:
        """The root of this salt; a new one is kept only once something is under it."""
        return self._roots.get(salt) or Node(ROOT_BLOCK, (), None, salt)

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> Match:
        """Whole blocks as far as they go, then the best block to copy a few tokens from."""
        size, node, blocks = self.block_size, self.start(salt), []
        for end in range(size, limit + 1, size):
            child = node.children.get(tuple(token_ids[end - size : end]))
            if child is None:
                break
            blocks.append(child.block)
            node = child
        matched = len(blocks) * size
        best = overlap(node, tuple(token_ids[matched : min(matched + size, limit)]))
        return Match(blocks, matched + best.num_tokens, node, best.block)

    def insert(self, cursor: Node, token_ids: tuple[int, ...], block: int) -> Node | None:
        """Put a block under `cursor`, unless its tokens are there already."""
        if cursor.block == ROOT_BLOCK:
            cursor = self._roots.setdefault(cursor.salt, cursor)
        elif self._nodes.get(cursor.block) is not cursor:
            return None  # forgotten, while its sequence ran on in blocks of its own
        child = cursor.children.get(token_ids)
        if child is None:
            child = Node(block, token_ids, cursor, cursor.salt)
            cursor.add(child)
            self._nodes[block] = child
        return child

    def forget(self, block: int) -> None:
        """Remove a block and all that follow it, which nobody could find any more.

        Free blocks come in an order that makes this a leaf: whoever holds a block holds those
        before it and frees them later. Only the blocks of a sequence that computed by itself what
        another had cached can hang under a node that it does not hold.
        """
        node = self._nodes[block]
        parent = node.parent
        if parent is None:
            return
        parent.remove(node)
        if parent.block == ROOT_BLOCK and not parent.children:
            del self._roots[parent.salt]
        del self._nodes[block]
        below = list(node.children.values())
        while below:
            gone = below.pop()
            del self._nodes[gone.block]
            self.lost.append(gone.block)
            below += gone.children.values()

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)


def overlap(node: Node, token_ids: tuple[int, ...]) -> Overlap:
    """The child that begins with most of `token_ids`, which no child equals."""
    place = bisect_left(node.order, token_ids)
    best = Overlap(None, 0)
    for key in node.order[max(place - 1, 0) : place + 1]:
        same = common_length(key, token_ids)
        if same > best.num_tokens:
            best = Overlap(node.children[key].block, same)
    return best


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first items are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
