"""A copy is safe once nobody waits for what is in its target. If every target is still needed, the
slots that are left form rings: putting one of them into the spare slot opens its ring.

The walk takes the drafts in their order, in which a parent comes before its children: so the child
of the last node of the path, if it is accepted, is still to come.
"""


def walk(parents: list[int], drafts: list[int], samples: list[int]) -> list[int]:
    """Each draft whose parent ends the path, and whose token was sampled there."""
    path = [0]
    for node, (parent, token) in enumerate(zip(parents, drafts, strict=True), start=1):
        if parent + 1 == path[-1] and token == samples[path[-1]]:
            path.append(node)
    return path


def emitted(path: list[int], samples: list[int]) -> list[int]:
    """The accepted drafts, and one token more."""
    return [samples[node] for node in path]


def moves(sources: list[int], targets: list[int], spare: int) -> list[tuple[int, int]]:
    """Free targets first; one slot of each ring by way of the spare slot."""
    waiting = {t: s for s, t in zip(sources, targets, strict=True) if s != t}
    found = []
    while waiting:
        free = [target for target in waiting if target not in waiting.values()]
        if not free:
            free = [next(iter(waiting))]
            found.append((free[0], spare))
            waiting = {t: spare if s == free[0] else s for t, s in waiting.items()}
        found.append((waiting.pop(free[0]), free[0]))
    return found


def commit(
    path: list[int], places: list[int], start: int, table: list[int], size: int, spare: int
) -> list[tuple[int, int]]:
    """From the places of the nodes to consecutive ones."""

    def slot(place: int) -> int:
        block, offset = divmod(start + place, size)
        return table[block] * size + offset

    sources = [slot(places[node]) for node in path]
    return moves(sources, [slot(place) for place in range(len(path))], spare)


def full_blocks(path: list[int], start: int, size: int) -> int:
    """Kept are `start` positions and one for each node of the path."""
    return (start + len(path)) // size
