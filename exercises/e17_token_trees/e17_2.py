"""e17.2: the accepted path of a token tree moves into place. The task is in README.md."""


def walk(parents: list[int], drafts: list[int], samples: list[int]) -> list[int]:
    """Return the accepted nodes, the root first."""
    raise NotImplementedError("TODO e17.2: on to the child whose token was sampled")


def emitted(path: list[int], samples: list[int]) -> list[int]:
    """Return the new tokens of the text."""
    raise NotImplementedError("TODO e17.2: what was sampled behind each node of the path")


def moves(sources: list[int], targets: list[int], spare: int) -> list[tuple[int, int]]:
    """Return pairs (source, target) of single copies, in an order that loses nothing."""
    raise NotImplementedError("TODO e17.2: first the copies whose target nobody needs any more")


def commit(
    path: list[int], places: list[int], start: int, table: list[int], size: int, spare: int
) -> list[tuple[int, int]]:
    """Return the moves that bring each node of the path to its position."""
    raise NotImplementedError("TODO e17.2: the slots of old and new positions, then moves")


def full_blocks(path: list[int], start: int, size: int) -> int:
    """Return how many blocks of `size` slots are full of kept positions."""
    raise NotImplementedError("TODO e17.2: the text before the root and the path")
