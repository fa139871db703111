"""Medusa heads (Cai et al., 2024): head i predicts the token i + 1 places behind the next one.

    hidden state of position n - 2 --output matrix--> token n - 1, which is already sampled
                 |--head 0--output matrix--> draft n
                 `--head 1--output matrix--> draft n + 1

A head is A h + W2 SiLU(W1 h), under the output matrix of the target. The original form,
h + SiLU(W h) with an output matrix of its own, cannot leave the direction of h under a shared one:
SiLU is never below -0.28. All heads see the same hidden state and not each other's drafts.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm.layers.linear import Linear
from minillm.models.decoder import allocate
from minillm.ops.transfers import indices
from minillm.scheduling.plan import StepPlan
from minillm.speculative.draws import Draws, pack_of
from minillm.speculative.features import Features
from minillm.speculative.proposer import Draft, DraftRow
from minillm.speculative.trees import Path, ranked, tree_of


class MedusaHeads(nn.Module):
    """`count` heads of a hidden layer of `width`: [N, d] -> [count, N, d]."""

    def __init__(
        self, count: int, size: int, width: int, dtype: torch.dtype, device: torch.device | str
    ):
        super().__init__()
        self.count, self.sizes = count, (size, width)
        with torch.device("meta"):
            outputs = dict[str, int]()
            for i in range(count):  # A and W1 of all heads have the same input
                outputs |= {f"{i}.skip": size, f"{i}.up": width}
            self.first = Linear("heads.", size, outputs)
            self.down = nn.ModuleList(
                Linear(f"heads.{i}.", width, {"down": size}) for i in range(count)
            )
        allocate(self, dtype, device)

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, d] -> [count, N, d]"""
        parts = self.first(hidden).unflatten(1, (self.count, -1))  # [N, count, d + width]
        skip, up = parts.split(self.sizes, dim=2)
        inner = F.silu(up).unbind(1)
        return torch.stack([
            skip[:, i] + down(inner[i].contiguous()) for i, down in enumerate(self.down)
        ])  # fmt: skip


class Medusa:
    """A proposer that drafts with one head per position.

    Args:
        logits: the target's output matrix, [K, d] -> [K, V].
        coupled: whether to sample with the target's noise (`draws.py`).
        tree: paths of a token tree; None drafts a chain of the heads' best tokens.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        features: Features,
        logits: Callable[[Tensor], Tensor],
        coupled: bool = True,
        tree: Sequence[Path] | None = None,
    ):
        self.heads, self.features, self.tree = heads, features, tree
        self.logits, self.coupled = logits, coupled

    def allocated(self) -> dict[str, int]:
        """Allocated bytes by part of the memory plan."""
        host = self.features.host
        return {
            "draft_weights": sum(parameter.nbytes for parameter in self.heads.parameters()),
            "draft_kv_cache": self.features.pages.num_bytes,
            "draft_swap_space": host.num_bytes if host else 0,
        }

    def follow(self, plan: StepPlan) -> None:
        """Apply the plan's block copies and swaps to the hidden states."""
        self.features.follow(plan)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """`num_drafts` drafts of each row: at most one per head, or the first of the tree."""
        if self.tree is not None:
            return self._propose_trees(rows, self.tree)
        ordered = sorted(rows, key=lambda row: -row.num_drafts)
        # The last token has no state yet: the state before it predicted it.
        spans = [(row.place, len(row.token_ids) - 2, 1) for row in ordered]
        states = self.heads(self.features.read(spans))  # [count, R, d]
        depth = min(ordered[0].num_drafts, len(states))
        logits = self.logits(states[:depth].flatten(0, 1)).unflatten(0, (depth, -1))  # one product
        draws = Draws(ordered, logits.device, self.coupled)
        for head, own in enumerate(logits):
            draws.draw(own[: sum(row.num_drafts > head for row in ordered)])
        drafts = dict(zip((row.new.seq_id for row in ordered), draws.drafts(), strict=True))
        return [drafts[row.new.seq_id] for row in rows]

    @torch.inference_mode()
    def ranks(self, rows: Sequence[DraftRow], depth: int, width: int) -> Tensor:
        """The `width` best tokens of the first `depth` heads: int64 [width, depth, R]."""
        states = self.heads(self.features.read([(r.place, len(r.token_ids) - 2, 1) for r in rows]))
        pack = pack_of([row for _ in range(depth) for row in rows], states.device)
        later = torch.arange(depth, device=states.device).repeat_interleave(len(rows))
        pack = pack._replace(position=pack.position + later)
        logits = self.logits(states[:depth].flatten(0, 1))  # [depth * R, V]
        return ranked(logits, pack, width).unflatten(1, (depth, len(rows)))

    def _propose_trees(self, rows: Sequence[DraftRow], paths: Sequence[Path]) -> list[Draft]:
        paths = paths[: max(row.num_drafts for row in rows)]
        table = self.ranks(rows, max(map(len, paths)), 1 + max(map(max, paths)))
        ranks, heads = zip(*((path[-1], len(path) - 1) for path in paths), strict=True)
        at = indices(table.device, [ranks, heads])
        tokens = table[at[0], at[1]].T.tolist()  # [R, drafts]
        parents = tree_of(paths).parents
        return [
            Draft(own[: row.num_drafts], None, parents[: row.num_drafts])
            for own, row in zip(tokens, rows, strict=True)
        ]
