"""Parallel drafting (P-EAGLE, 2026, arXiv 2602.01469): all drafts by one pass of an EAGLE layer.

    position     n - 1              n             n + 1
    input        x, g of n - 2      mask, mask    mask, mask     one learned embedding and feature
    output       draft n            draft n + 1   draft n + 2

The masks behind the last token are computed with the positions that the layer has not computed
yet. A mask attends to all positions before it, to masks too. It knows no draft, so it is right less
often than a draft that was fed those before; but k drafts take one pass instead of k.
"""

from collections.abc import Sequence

import numpy as np
import torch

from minillm.models.batches import make_batch
from minillm.ops.transfers import indices
from minillm.speculative.draws import Draws
from minillm.speculative.eagle import Eagle, EagleLayer
from minillm.speculative.proposer import Draft, DraftRow


class ParallelEagle(Eagle):
    """A proposer that drafts with an EAGLE layer that has masks."""

    layer: EagleLayer

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """As of `DraftModel`."""
        chunks = sorted(self._chunks(rows), key=lambda chunk: -chunk.row.num_drafts)
        ready = np.array([chunk.end == len(chunk.row.token_ids) for chunk in chunks])
        # The positions of a row that are computed, without and with its masks.
        known = np.array([chunk.end - chunk.start for chunk in chunks])
        counts = known + ready * np.array([chunk.row.num_drafts - 1 for chunk in chunks])
        ends = counts.cumsum()
        place = np.arange(ends[-1]) - (ends - counts).repeat(counts)
        is_mask = place >= known.repeat(counts)
        ids = [
            row.token_ids[place] if place < len(row.token_ids) else 0
            for (row, start, _), count in zip(chunks, counts.tolist(), strict=True)
            for place in range(start, start + count)
        ]
        places, starts = [chunk.row.place for chunk in chunks], [chunk.start for chunk in chunks]
        size = self.shadow.kv.block_size
        batch = make_batch(self.tables, size, places, starts, counts.tolist(), ids)
        device = self.layer.device
        embedded = self.target.embedding(batch.input_ids)
        given, at = (indices(device, np.flatnonzero(is_mask == masked)) for masked in (False, True))
        features = torch.empty_like(embedded)
        features[given] = self._features(chunks, batch.positions[given])
        embedded[at], features[at] = self.layer.mask(torch.arange(2, device=device))[:, None]
        hidden = self.layer(embedded, features, batch, self.shadow.kv)
        asked = [chunk.row for chunk, is_ready in zip(chunks, ready, strict=True) if is_ready]
        if not asked:
            return [Draft([]) for _ in rows]
        last, draws = (ends - counts + known - 1)[ready], Draws(asked, device, self.coupled)
        for depth in range(asked[0].num_drafts):
            active = sum(row.num_drafts > depth for row in asked)
            draws.draw(self._logits(hidden[indices(device, last[:active] + depth)]))
        ids_of = (row.new.seq_id for row in asked)
        drafts = dict(zip(ids_of, draws.drafts(), strict=True))
        return [drafts.get(row.new.seq_id, Draft([])) for row in rows]
