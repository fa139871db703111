"""Another way: climb from each node to the root."""


def climb(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to `node`."""
    path = [node]
    while path[-1]:
        path.append(parents[path[-1] - 1] + 1)
    path.reverse()
    return path


def positions(parents: list[int], start: int) -> list[int]:
    """The length of the path."""
    return [start + len(climb(parents, node)) - 1 for node in range(len(parents) + 1)]


def masks(parents: list[int]) -> list[int]:
    """A sum of powers of two."""
    return [sum(2**each for each in climb(parents, node)) for node in range(len(parents) + 1)]


def visible(parents: list[int], start: int, window: int | None) -> list[list[bool]]:
    """Nothing, then the text, then the path, each entry alone."""
    rows = []
    for node in range(len(parents) + 1):
        path = climb(parents, node)
        position = start + len(path) - 1
        row = [False] * (start + len(parents) + 1)
        for there in range(start):
            row[there] = window is None or position - there < window
        for depth, each in enumerate(path):
            row[start + each] = window is None or position - (start + depth) < window
        rows.append(row)
    return rows


def leaves(parents: list[int]) -> list[list[int]]:
    """Nodes that nobody names as a parent; the root alone, if there are no drafts."""
    if not parents:
        return [[0]]
    ends = [node for node in range(1, len(parents) + 1) if node - 1 not in parents]
    return [climb(parents, node) for node in ends]
