"""A draft has all that its parent has, and one thing more: a position, a bit, a node of its path.

Parents come before children, so one loop over the drafts is enough. Slots and positions differ in a
tree: siblings have one position and two slots. So a window is compared with the position that a
slot holds, not with the number of the slot.
"""


def positions(parents: list[int], start: int) -> list[int]:
    """One behind the parent, which is node parent + 1."""
    found = [start]
    for parent in parents:
        found.append(found[parent + 1] + 1)
    return found


def masks(parents: list[int]) -> list[int]:
    """The ancestors of the parent, the parent, and the node itself."""
    found = [1]
    for node, parent in enumerate(parents, start=1):
        found.append(found[parent + 1] | 1 << node)
    return found


def visible(parents: list[int], start: int, window: int | None) -> list[list[bool]]:
    """One bit for each slot: the text, and the mask behind it."""
    at = positions(parents, start)
    held = [*range(start), *at]
    rows = []
    for position, mask in zip(at, masks(parents), strict=True):
        seen = (1 << start) - 1 | mask << start
        first = 0 if window is None else position - window + 1
        rows.append([
            bool(seen >> slot & 1) and there >= first
            for slot, there in enumerate(held)
        ])  # fmt: skip
    return rows


def leaves(parents: list[int]) -> list[list[int]]:
    """The paths of all nodes, without those of nodes that are parents."""
    found = [[0]]
    for node, parent in enumerate(parents, start=1):
        found.append([*found[parent + 1], node])
    inner = {parent + 1 for parent in parents}
    return [path for node, path in enumerate(found) if node not in inner]
