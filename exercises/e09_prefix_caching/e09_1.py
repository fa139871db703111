"""e09.1: a radix tree. The task is in README.md."""

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
        raise NotImplementedError(
            "TODO e09.1: follow the tree, and split the edge where texts differ"
        )

    def match(self, tokens: list[int], salt: str, sampling: bool) -> list[int]:
        """Return the slots of the longest prefix of `tokens` in the tree, one per token.

        With `sampling`, leave out the last of `tokens`, which has to be computed.
        """
        raise NotImplementedError("TODO e09.1: collect the slots of the longest prefix")

    def edges(self, salt: str) -> list[list[int]]:
        """Return the tokens of every edge of this salt's tree, sorted."""
        found, waiting = [], [self.roots.get(salt, Edge([], []))]
        while waiting:
            edge = waiting.pop()
            found += [list(child.tokens) for child in edge.children.values()]
            waiting += edge.children.values()
        return sorted(found)
