"""e17.1: positions and visible slots of a token tree. The task is in README.md."""


def positions(parents: list[int], start: int) -> list[int]:
    """Return the position of each node: the root at `start`, then the drafts."""
    raise NotImplementedError("TODO e17.1: one position behind the parent")


def masks(parents: list[int]) -> list[int]:
    """Return a whole number for each node, whose bits are its ancestors and itself."""
    raise NotImplementedError("TODO e17.1: the bits of the parent and one more")


def visible(parents: list[int], start: int, window: int | None) -> list[list[bool]]:
    """Return for each node whether it sees each slot of the text and of the tree."""
    raise NotImplementedError("TODO e17.1: the text, ancestors and itself, within the window")


def leaves(parents: list[int]) -> list[list[int]]:
    """Return the path of nodes from the root to each node without children."""
    raise NotImplementedError("TODO e17.1: the parent's path and the node, where it is a leaf")
