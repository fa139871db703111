"""Three things can happen at an edge, and each of them has one place in the walk.

The whole edge agrees: continue below it. The tokens end inside it: nothing is stored. The texts
differ inside it: split it; after that, the walk is at the end of an edge, as in the first case. So
new tokens are always stored below an edge that ends at the current place.

The resulting tree depends only on the texts, not on the order in which they arrived. It has an edge
for each text that is no prefix of another, and for each place where texts differ, except at the
root. Ten turns of one conversation are one edge, while a tree with a node per token has as many
nodes as tokens. And each edge has the slots of exactly its own tokens, so a match of any length
returns its own memory.
"""

from dataclasses import dataclass, field


@dataclass
class Edge:
    """A run of tokens, the slots of their keys and values, and its children by first token."""

    tokens: list[int]
    slots: list[int]
    children: dict[int, "Edge"] = field(default_factory=dict)


def common_length(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix of two lists."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


class RadixTree:
    """Texts and the slots of their keys and values: one tree per salt."""

    def __init__(self) -> None:
        """Make a tree without texts. A root is an edge without tokens."""
        self.roots: dict[str, Edge] = {}

    def insert(self, tokens: list[int], slots: list[int], salt: str) -> int:
        """Store a text; return how many of its tokens were stored already and keep their slots."""
        root = edge = self.roots.setdefault(salt, Edge([], []))
        at = 0
        while at < len(tokens) and tokens[at] in edge.children:
            edge = edge.children[tokens[at]]
            shared = common_length(edge.tokens, tokens[at:])
            at += shared
            if shared < len(edge.tokens):
                if at == len(tokens):
                    return at
                self.split(edge, shared)
        if at < len(tokens):
            if edge is root or edge.children:
                edge.children[tokens[at]] = Edge(tokens[at:], slots[at:])
            else:
                edge.tokens += tokens[at:]
                edge.slots += slots[at:]
        return at

    def split(self, edge: Edge, length: int) -> None:
        """Cut an edge after `length` of its tokens: what follows hangs below the second part."""
        tail = Edge(edge.tokens[length:], edge.slots[length:], edge.children)
        edge.tokens, edge.slots = edge.tokens[:length], edge.slots[:length]
        edge.children = {tail.tokens[0]: tail}

    def match(self, tokens: list[int], salt: str, sampling: bool) -> list[int]:
        """Return the slots of the longest prefix of `tokens` in the tree, one per token.

        With `sampling`, leave out the last of `tokens`, which has to be computed.
        """
        found: list[int] = []
        wanted = tokens[:-1] if sampling else tokens
        edge = self.roots.get(salt, Edge([], []))
        while len(found) < len(wanted) and wanted[len(found)] in edge.children:
            edge = edge.children[wanted[len(found)]]
            shared = common_length(edge.tokens, wanted[len(found) :])
            found += edge.slots[:shared]
            if shared < len(edge.tokens):
                break
        return found

    def edges(self, salt: str) -> list[list[int]]:
        """Return the tokens of every edge of this salt's tree, sorted."""
        found, waiting = [], [self.roots.get(salt, Edge([], []))]
        while waiting:
            edge = waiting.pop()
            found += [list(child.tokens) for child in edge.children.values()]
            waiting += edge.children.values()
        return sorted(found)
