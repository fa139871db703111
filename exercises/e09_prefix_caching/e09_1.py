"""e09.1: a radix tree. The task is in README.md."""

from dataclasses import dataclass, field


@dataclass
class Edge:
    """A run of tokens, the slots of their keys and values, and what may follow, by first token."""

    tokens: list[int]
    slots: list[int]
    children: dict[int, "Edge"] = field(default_factory=dict)


def common_length(one: list[int], other: list[int]) -> int:
    """How many of the first tokens of two lists are equal."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


class RadixTree:
    """Texts and the slots of their keys and values: per salt a tree whose edges are long."""

    def __init__(self) -> None:
        """No texts. A root is an edge without tokens."""
        self.roots: dict[str, Edge] = {}

    def insert(self, tokens: list[int], slots: list[int], salt: str) -> int:
        """Store a text; returns how many of its tokens were there already and keep their slots."""
        raise NotImplementedError("TODO e09.1: follow what is there, split where texts part")

    def match(self, tokens: list[int], salt: str, sampling: bool) -> list[int]:
        """The slots of the longest start of `tokens` that is in the tree, one per token.

        With `sampling`, the last of `tokens` is left out, for it has to be computed.
        """
        raise NotImplementedError("TODO e09.1: collect the slots of the longest start")

    def edges(self, salt: str) -> list[list[int]]:
        """The tokens of every edge of this salt's tree, sorted."""
        found, waiting = [], [self.roots.get(salt, Edge([], []))]
        while waiting:
            edge = waiting.pop()
            found += [list(child.tokens) for child in edge.children.values()]
            waiting += edge.children.values()
        return sorted(found)
