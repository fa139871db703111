"""Token trees of drafts: how they grow, how their tokens are ranked, how a path is kept.

    path of ranks    (0,)  (1,)  (0, 0)  (0, 1)        as in Medusa's `medusa_choices`
    parents           -1    -1     0       0

A path names a draft by the rank of each token among its head's tokens: (0, 1) is the second best
token of head 1 behind the best of head 0. All siblings are different tokens, so the one that equals
the target's sample, if there is one, is accepted with the probability of the target: without a
residual distribution no other rule accepts more (`sampling/verify.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.models.batches import BlockTables
from minillm.models.trees import ROOT, Tree
from minillm.ops.sampling import Pack, choose
from minillm.ops.slots import move_slot

Path = tuple[int, ...]
Table = Sequence[Sequence[float]]  # [heads, ranks], the share of tokens that each rank predicts


def values(paths: Sequence[Path], accuracy: Table) -> list[float]:
    """The probability that all of each path is accepted, as if heads were independent."""
    rates = []
    for path in paths:
        value = 1.0
        for head, rank in enumerate(path):
            value *= accuracy[head][rank] if rank < len(accuracy[head]) else 0.0
        rates.append(value)
    return rates


def in_order(paths: Sequence[Path], accuracy: Table | None) -> list[Path]:
    """The paths by falling value, parents before children: a tree of fewer drafts is the first of
    them."""
    known = values(paths, accuracy) if accuracy else [0.0] * len(paths)
    ordered = sorted(zip(known, paths, strict=True), key=lambda one: (-one[0], len(one[1]), one[1]))
    return [path for _, path in ordered]


def grown(accuracy: Table, most: int) -> list[Path]:
    """The tree of `most` drafts of the highest values, by falling value: greedy growth (Medusa, Cai
    et al., 2024, section 2.3.2). It adds the best child or next sibling of a draft again and
    again."""
    found: list[Path] = []
    edge: dict[Path, float] = {(0,): values([(0,)], accuracy)[0]}
    while edge and len(found) < most:
        best = min(edge, key=lambda path: (-edge[path], len(path), path))
        if edge.pop(best) <= 0:
            break
        found.append(best)
        near = [(*best[:-1], best[-1] + 1), (*best, 0)]
        near = [path for path in near if len(path) <= len(accuracy)]
        edge |= zip(near, values(near, accuracy), strict=True)
    return found


def tree_of(paths: Sequence[Path]) -> Tree:
    """The tree of paths, in their order; each parent is before its children."""
    index = {path: place for place, path in enumerate(paths)}
    return Tree(tuple(index[path[:-1]] if len(path) > 1 else ROOT for path in paths))


def valid_tree(parents: Sequence[int], tokens: Sequence[int]) -> Tree | None:
    """The tree of drafts that a proposer returned; None if each follows the one before.

    Raises:
        ValueError: a draft has no parent before it, or the same parent and token as another.
    """
    if len(parents) < len(tokens):
        raise ValueError(f"it returned {len(tokens)} drafts with {len(parents)} parents")
    tree = Tree(tuple(int(parent) for parent in parents[: len(tokens)]))
    for draft, parent in enumerate(tree.parents):
        if not ROOT <= parent < draft:
            raise ValueError(
                f"draft {draft} has parent {parent}; it must be an earlier draft, or {ROOT} for "
                "the last token"
            )
    if len(set(zip(tree.parents, tokens, strict=True))) < len(tokens):
        raise ValueError("two drafts have the same parent and token")
    return None if tree.is_chain else tree


def ranked(logits: Tensor, pack: Pack, width: int) -> Tensor:
    """The `width` best tokens of each row, best first: logits [K, V] -> int64 [width, K].

    With noise of the pack, the target's own: the ranks of a sample at the target's temperature.
    """
    logits, ranks = logits.clone(), []
    for _ in range(width):
        ranks.append(choose(logits, pack)[0])
        logits.scatter_(1, ranks[-1][:, None], -torch.inf)
    return torch.stack(ranks)


def keep_path(
    caches: Sequence[Tensor], tables: BlockTables, row: int, start: int, path: Sequence[int]
) -> None:
    """Move the slots of an accepted path behind each other: node path[i] to position start + i.

    Path numbers ascend, so path[i] >= i, and in ascending order no move overwrites the source of a
    later one.

    Args:
        caches: pages [layers, blocks, heads, block_size(, D)] of all that is stored of a position.
        row: of the sequence in `tables`.
        start: position of the tree's root.
        path: nodes from the root, 0, on.
    """
    table, size = tables.host[row], caches[0].shape[3]
    for place, node in enumerate(path):
        if node == place:
            continue
        (source, old), (target, new) = (divmod(start + slot, size) for slot in (node, place))
        for cache in caches:
            move_slot(cache, int(table[source]) * size + old, int(table[target]) * size + new)
