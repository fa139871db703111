"""How an EAGLE layer, or a multi-token prediction layer, drafts a token tree: level by level.

    level 1    the best tokens after the last token
    level 2    one pass over the drafts of level 1 that have children: token and a of its parent
    level 3    ...                                     each attends to its own ancestors only

A draft's keys and values are in the slot of its node, as in the target. Ranks are those of the
target's noise (`trees.ranked`), so the best path is the chain that `Eagle` drafts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from minillm.models.batches import make_batch
from minillm.models.trees import nodes_alone, tree_batch
from minillm.ops.transfers import upload
from minillm.speculative.draws import pack_of
from minillm.speculative.eagle import Eagle
from minillm.speculative.proposer import Draft, DraftRow
from minillm.speculative.trees import Path, ranked, tree_of


class EagleTrees(Eagle):
    """A proposer that drafts the first `num_drafts` paths of `tree`, parents before children."""

    def __init__(self, *parts: Any, tree: Sequence[Path]):
        super().__init__(*parts)
        self.tree = tree

    def _draft(self, rows: Sequence[DraftRow], hidden: Tensor) -> dict[int, Draft]:
        """Drafts by seq_id; `hidden` [len(rows), d] is a of each row's last token."""
        paths = [self.tree[: row.num_drafts] for row in rows]
        trees = [tree_of(own) for own in paths]
        sizes = [1 + len(own) for own in paths]
        first = np.cumsum([0, *sizes[:-1]])  # the numbers of the roots among all nodes
        starts, places = [len(row.token_ids) - 1 for row in rows], [row.place for row in rows]
        size, unknown = self.shadow.kv.block_size, [0] * sum(sizes)
        flat = make_batch(self.tables, size, places, starts, sizes, unknown)
        batch = tree_batch(flat, starts, sizes, trees)
        owner, depth = np.arange(len(rows)).repeat(sizes), np.concatenate([t.depths for t in trees])
        rank = np.array([rank for own in paths for rank in (0, *(path[-1] for path in own))])
        parent = np.concatenate([[0, *(1 + p for p in t.parents)] for t in trees]) + first[owner]
        states = hidden.new_empty(len(owner), hidden.shape[1])
        (roots,) = upload(hidden.device, first)
        states[roots] = hidden
        for level in range(1, depth.max() + 1):
            children = np.flatnonzero(depth == level)
            nodes, place = np.unique(parent[children], return_inverse=True)
            there, above, of, ranks, column = upload(
                hidden.device, nodes, parent[nodes], children, rank[children], place
            )
            if level > 1:
                states[there] = self._run(nodes_alone(batch, there), states[above])
            pack = pack_of([rows[i] for i in owner[nodes]], hidden.device)
            pack = pack._replace(position=pack.position + (level - 1))
            best = ranked(self._logits(states[there]), pack, 1 + int(rank[children].max()))
            batch.input_ids[of] = best[ranks, column]
        tokens = batch.input_ids.tolist()
        return {
            row.new.seq_id: Draft(tokens[start + 1 : start + count], None, tree.parents)
            for row, start, count, tree in zip(rows, first.tolist(), sizes, trees, strict=True)
        }
