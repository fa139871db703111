"""Prefix cache as a tree (RadixAttention; Zheng et al., 2024): one node per block.

              root of a salt
              /            \\
        [1 2 3 4]        [1 2 9 9]       a prompt 1 2 3 5 ... shares no whole block with either,
         /     \\                         but its first 3 tokens are in the block [1 2 3 4],
    [5 6 7 8]  [5 6 0 0]                 which is copied to reuse them

Differences to the hash chain: a match can end inside a block, each block costs a token comparison
instead of a hash, and evicting a block drops all blocks below it. Unlike in SGLang, chains of
single children are not merged into one edge: every node is one block.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from minillm.cache.prefix import Match

ROOT_BLOCK = -1


class Node:
    """One cached block; its ancestors hold the tokens before it.

    `order` lists the children sorted by tokens: the child with the longest common prefix with given
    tokens is next to the position where these would be inserted.
    """

    __slots__ = ("block", "children", "order", "parent", "salt", "token_ids")

    def __init__(self, block: int, token_ids: tuple[int, ...], parent: "Node | None", salt: str):
        self.block, self.token_ids, self.parent, self.salt = block, token_ids, parent, salt
        self.children: dict[tuple[int, ...], Node] = {}
        self.order: list[tuple[int, ...]] = []

    def add(self, child: "Node") -> None:
        """Add a child."""
        self.children[child.token_ids] = child
        insort(self.order, child.token_ids)

    def remove(self, child: "Node") -> None:
        """Remove a child."""
        del self.children[child.token_ids]
        del self.order[bisect_left(self.order, child.token_ids)]


class Overlap(NamedTuple):
    """A block whose first `num_tokens` tokens match; None if no block starts with a match."""

    block: int | None
    num_tokens: int


class RadixTree:
    """The prefix index as one tree per salt; a cursor is the node of the prefix's last block."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.lost: list[int] = []
        self._roots: dict[str, Node] = {}  # by salt; only roots with children
        self._nodes: dict[int, Node] = {}  # by block

    def start(self, salt: str) -> Node:
        """The root of this salt. `insert` stores a new root when it gets its first child."""
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
        """Add a block as a child of `cursor`, unless a child has the same tokens."""
        if cursor.block == ROOT_BLOCK:
            cursor = self._roots.setdefault(cursor.salt, cursor)
        elif self._nodes.get(cursor.block) is not cursor:
            return None  # evicted: the sequence computed this prefix in blocks of its own
        child = cursor.children.get(token_ids)
        if child is None:
            child = Node(block, token_ids, cursor, cursor.salt)
            cursor.add(child)
            self._nodes[block] = child
        return child

    def forget(self, block: int) -> None:
        """Remove a block and its whole subtree, which no match can reach without it.

        Evicted blocks are usually leaves, because a table frees its blocks from the last to the
        first. The exception: a sequence computed in its own blocks what another had cached. Its
        later blocks are then children of a block that is not in its table.
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
    """The child with the longest common prefix with `token_ids`, which equal no child."""
    place = bisect_left(node.order, token_ids)
    best = Overlap(None, 0)
    for key in node.order[max(place - 1, 0) : place + 1]:
        same = common_length(key, token_ids)
        if same > best.num_tokens:
            best = Overlap(node.children[key].block, same)
    return best


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
