"""Token trees: several continuations of a sequence, computed in one pass (SpecInfer, Miao et al.,
2024; Medusa, Cai et al., 2024).

    last token   draft 0   draft 2      nodes of the tree, parents before children
          start ------+------- +
                      +------ draft 3
          +------- draft 1
    slot         start  + 1  + 2  + 3  + 4      one after another
    position     start  + 1  + 1  + 2  + 2      by depth: the first two drafts are alternatives

A node attends to the sequence before `start` and to its ancestors. Each node is a sequence of one
query in the batch, and its keys are read in the order of positions (`Tails`), as plain decoding
would: a mask over the slots would give the same numbers but for the order of sums, which changes
bits. A chain is a tree, and its batch has no `Tails`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minillm.models.batches import Numbers
from minillm.ops.batch import Batch, Tails
from minillm.ops.transfers import upload

ROOT = -1  # the parent of drafts behind the last token


@dataclass(frozen=True)
class Tree:
    """A tree of drafts; `parents[i]`, below i, is the parent of draft i: a draft or `ROOT`."""

    parents: tuple[int, ...]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Positions of the root, which is 0, and of the drafts, relative to the root."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return tuple(depths)

    @cached_property
    def paths(self) -> NDArray[np.int32]:
        """For each node the nodes of its path from the root on, numbered from the root, 0: [n, T].
        The rest of a row is 0."""
        ancestors = np.zeros((1 + len(self.parents), 1 + max(self.depths)), dtype=np.int32)
        for node, parent in enumerate(self.parents, start=1):
            ancestors[node] = ancestors[parent + 1]
            ancestors[node, self.depths[node]] = node
        return ancestors

    @property
    def is_chain(self) -> bool:
        """Whether each draft follows the one before."""
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    @cached_property
    def chain(self) -> tuple[int, ...]:
        """The drafts of the path that goes from each node on to its first child."""
        starts, last = [], ROOT
        for draft, parent in enumerate(self.parents):
            if parent == last:
                starts.append(draft)
                last = draft
        return tuple(starts)

    def walk(self, samples: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """The accepted nodes, the root first: from each node on to the child that is the token
        sampled there.

        Args:
            samples: the token sampled at each node, the root first.
            drafts: the tokens of the drafts.
        """
        path = [0]
        for node, (parent, token) in enumerate(zip(self.parents, drafts, strict=True), start=1):
            if parent + 1 == path[-1] and samples[path[-1]] == token:
                path.append(node)
        return path


def tree_batch(
    flat: Batch, starts: Sequence[int], counts: Sequence[int], trees: Sequence[Tree | None]
) -> Batch:
    """The batch in which rows with a tree are its nodes, the root at position `start`, from the
    `flat` one in which each row is a chain."""
    sizes = [1 if tree is None else len(tree.depths) for tree in trees]  # sequences of each row
    place = np.arange(len(trees)).repeat(sizes)
    width = max(tree.paths.shape[1] for tree in trees if tree is not None)
    lengths: Numbers = np.add(starts, counts).repeat(sizes)
    tail_starts, order = lengths.copy(), np.zeros((len(place), width), dtype=np.int32)
    tokens: Numbers = np.array(counts, dtype=np.int64).repeat(sizes)
    spans = [np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
    end = 0
    for i, (tree, size) in enumerate(zip(trees, sizes, strict=True)):
        begin, end = end, end + size
        if tree is None:
            continue
        spans[i] = starts[i] + np.array(tree.depths)
        lengths[begin:end], tail_starts[begin:end] = spans[i] + 1, starts[i]
        order[begin:end, : tree.paths.shape[1]] = tree.paths
        tokens[begin:end] = 1
    bounds = np.concatenate(([0], tokens.cumsum()))
    positions, query_start, seq_lens, tail_start, orders, last, of = upload(
        flat.positions.device, np.concatenate(spans), bounds.astype(np.int32),
        lengths.astype(np.int32), tail_starts.astype(np.int32), order, bounds[1:] - 1, place,
    )  # fmt: skip
    return replace(
        flat,
        positions=positions,
        query_start=query_start,
        seq_lens=seq_lens,
        block_tables=flat.block_tables[of],
        logits_indices=last,
        max_query_len=int(tokens.max()),
        tails=Tails(tail_start, orders),
        on_host=(bounds, lengths),
    )


def nodes_alone(batch: Batch, nodes: Tensor) -> Batch:
    """Some nodes of a batch of which every row is a tree, each with its ancestors."""
    last = torch.arange(len(nodes) + 1, device=nodes.device)
    return replace(
        batch,
        input_ids=batch.input_ids[nodes],
        positions=batch.positions[nodes],
        slot_mapping=batch.slot_mapping[nodes],
        query_start=last.int(),
        seq_lens=batch.seq_lens[nodes],
        block_tables=batch.block_tables[nodes],
        logits_indices=last[:-1],
        max_query_len=1,
        tails=batch.tails and Tails(*(tail[nodes] for tail in batch.tails)),
        on_host=None,
    )
