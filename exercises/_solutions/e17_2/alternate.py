"""Another way: children by parent and token, and moves by following each chain of slots."""


def walk(parents: list[int], drafts: list[int], samples: list[int]) -> list[int]:
    """Look up the child."""
    child = {}
    for draft, parent in enumerate(parents):
        child[parent + 1, drafts[draft]] = draft + 1
    path, node = [], 0
    while node is not None:
        path.append(node)
        node = child.get((node, samples[node]))
    return path


def emitted(path: list[int], samples: list[int]) -> list[int]:
    """One for each node."""
    tokens = []
    for node in path:
        tokens.append(samples[node])
    return tokens


def moves(sources: list[int], targets: list[int], spare: int) -> list[tuple[int, int]]:
    """Chains from their free end; what is left are rings."""
    comes_from = {targets[i]: sources[i] for i in range(len(targets)) if sources[i] != targets[i]}
    needed = set(comes_from.values())
    found = []
    for end in [target for target in comes_from if target not in needed]:
        while end in comes_from:
            source = comes_from.pop(end)
            found.append((source, end))
            end = source
    while comes_from:
        first = end = min(comes_from)
        found.append((first, spare))
        while True:
            source = comes_from.pop(end)
            if source == first:
                found.append((spare, end))
                break
            found.append((source, end))
            end = source
    return found


def commit(
    path: list[int], places: list[int], start: int, table: list[int], size: int, spare: int
) -> list[tuple[int, int]]:
    """All slots of the sequence in a list."""
    slots = [block * size + offset for block in table for offset in range(size)]
    sources = [slots[start + places[node]] for node in path]
    targets = [slots[start + place] for place in range(len(path))]
    return moves(sources, targets, spare)


def full_blocks(path: list[int], start: int, size: int) -> int:
    """Fill blocks one position at a time."""
    full, used = 0, 0
    for _ in range(start + len(path)):
        used += 1
        if used == size:
            full, used = full + 1, 0
    return full
