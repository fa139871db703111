"""You take a token off every match for sampling: only the last of the tokens stays out."""

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
        """The slots of the longest start of `tokens` that is in the tree, one per token.

        With `sampling`, the last of `tokens` is left out, for it has to be computed.
        """
        found: list[int] = []
        wanted = tokens
        edge = self.roots.get(salt, Edge([], []))
        while len(found) < len(wanted) and wanted[len(found)] in edge.children:
            edge = edge.children[wanted[len(found)]]
            shared = common_length(edge.tokens, wanted[len(found) :])
            found += edge.slots[:shared]
            if shared < len(edge.tokens):
                break
        return found[:-1] if sampling else found

    def edges(self, salt: str) -> list[list[int]]:
        """The tokens of every edge of this salt's tree, sorted."""
        found, waiting = [], [self.roots.get(salt, Edge([], []))]
        while waiting:
            edge = waiting.pop()
            found += [list(child.tokens) for child in edge.children.values()]
            waiting += edge.children.values()
        return sorted(found)
