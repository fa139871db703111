"""Speculative decoding with a draft model: a smaller model with the same vocabulary.

    target   ... t8 t9 | d1 d2 d3 d4          one pass over 5 tokens, which verifies 4 drafts
    draft    [t8 t9] -> d1 -> d2 -> d3 -> d4   one pass over the tokens without KV, then one
                                               for each further draft

Usually the draft model has no KV for one token, the last that the target sampled. After a step that
accepted all drafts it has none for two, because the last draft was never an input. For a sequence
that is new, or had no drafts for some steps, it first computes all positions that `Shadow` does not
list as valid.

By default the draft model samples with the same noise as the target, which is a function of seed,
sample index and position: both take the argmax of logits plus noise. They agree more often than
with independent noise (Daliri, Musco, Suresh, 2024), and always where the models do.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minillm.models.batches import BlockTables, decode_batch, make_batch
from minillm.ops.batch import Batch
from minillm.ops.transfers import upload
from minillm.scheduling.plan import StepPlan
from minillm.speculative.draws import Draws
from minillm.speculative.proposer import Draft, DraftRow
from minillm.speculative.shadow import Shadow


class Chunk(NamedTuple):
    """Positions `start` to `end` of a sequence, to be computed by the draft model."""

    row: DraftRow
    start: int
    end: int


class DraftModel:
    """A proposer that runs a draft model.

    Args:
        model: the draft model, a `Decoder` or `TiledDecoder`.
        shadow: its KV cache.
        tables: block tables shared with the target; `DraftRow.place` is the row.
        max_num_tokens: maximum tokens of one pass over missing positions. A sequence that still has
            missing positions after it gets no drafts in this step.
        coupled: whether to sample with the target's noise. If not, it samples with separate noise
            and returns the distribution of each draft, for ``rejection_sample_method="standard"``.
    """

    keeps_drafts = True  # whether keys and values of accepted drafts are those of known tokens

    def __init__(
        self,
        model: Any,
        shadow: Shadow,
        tables: BlockTables,
        max_num_tokens: int,
        coupled: bool = True,
    ):
        self.model, self.shadow, self.tables = model, shadow, tables
        self.max_num_tokens, self.coupled = max_num_tokens, coupled
        # On a GPU, hidden states of one token of each row from a CUDA graph: (rows, positions,
        # tokens) -> [R, d], or None if there is none.
        self.replay: Callable[[list[int], list[int], Tensor], Tensor | None] | None = None

    def allocated(self) -> dict[str, int]:
        """Allocated bytes by part of the memory plan."""
        host = self.shadow.host
        return {
            "draft_weights": sum(
                tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers())
            ),
            "draft_kv_cache": self.shadow.kv.num_bytes,
            "draft_swap_space": host.num_bytes if host else 0,
        }

    def follow(self, plan: StepPlan) -> None:
        """Apply the plan's block copies and swaps to the draft model's cache."""
        self.shadow.follow(plan)

    def forget(self, seq_id: int) -> None:
        """Remove a sequence."""
        self.shadow.forget(seq_id)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        """`num_drafts` drafts of each row, or none if positions are still missing."""
        chunks = self._chunks(rows)
        hidden = self._catch_up(chunks)
        ends = np.cumsum([chunk.end - chunk.start for chunk in chunks]) - 1
        # Rows with the most drafts first: the rows still active at each depth are a prefix.
        ready = sorted(
            (i for i, chunk in enumerate(chunks) if chunk.end == len(chunk.row.token_ids)),
            key=lambda i: -chunks[i].row.num_drafts,
        )
        if not ready:
            return [Draft([]) for _ in rows]
        (last,) = upload(self.model.device, ends[ready])
        drafts = self._draft([chunks[i].row for i in ready], hidden[last])
        return [drafts.get(row.new.seq_id, Draft([])) for row in rows]

    def _chunks(self, rows: Sequence[DraftRow]) -> list[Chunk]:
        """Missing positions of each row, the shortest first, at most `max_num_tokens` in total."""
        computed = {row.new.seq_id: self._num_computed(row) for row in rows}
        left, chunks = self.max_num_tokens, []
        for row in sorted(rows, key=lambda row: len(row.token_ids) - computed[row.new.seq_id]):
            start = self._num_computed(row)  # again: an earlier row may share its blocks
            end = min(len(row.token_ids), start + left)
            if start < end:
                chunks.append(Chunk(row, start, end))
                self.shadow.mark(row.new.seq_id, start, end)
                left -= end - start
        return chunks

    def _num_computed(self, row: DraftRow) -> int:
        """Number of valid positions, except the last token's, whose logits are needed."""
        return min(self.shadow.num_computed(row.new.seq_id), len(row.token_ids) - 1)

    def _catch_up(self, chunks: Sequence[Chunk]) -> Tensor:
        """Hidden states [N, d] of all tokens of the chunks."""
        return self.model(self._batch(chunks), self.shadow.kv)

    def _batch(self, chunks: Sequence[Chunk]) -> Batch:
        return make_batch(
            self.tables,
            self.shadow.kv.block_size,
            [row.place for row, _, _ in chunks],
            [start for _, start, _ in chunks],
            [end - start for _, start, end in chunks],
            [token for row, start, end in chunks for token in row.token_ids[start:end]],
        )

    def _draft(self, rows: Sequence[DraftRow], hidden: Tensor) -> dict[int, Draft]:
        """Drafts by seq_id.

        Args:
            rows: in descending order of `num_drafts`.
            hidden: [len(rows), d], hidden state of each row's last token.
        """
        draws = Draws(rows, self.model.device, self.coupled)
        for depth in range(rows[0].num_drafts):
            active = [row for row in rows if row.num_drafts > depth]
            if depth:
                starts = [len(row.token_ids) + depth - 1 for row in active]
                tokens = draws.tokens[-1][: len(active)]
                hidden = self._next(active, starts, tokens, hidden[: len(active)])
            draws.draw(self._logits(hidden[: len(active)]))
        for row in rows if self.keeps_drafts else ():
            known = len(row.token_ids)
            self.shadow.mark(row.new.seq_id, known, known + row.num_drafts - 1)
        return {row.new.seq_id: draft for row, draft in zip(rows, draws.drafts(), strict=True)}

    def _next(
        self, rows: Sequence[DraftRow], starts: list[int], tokens: Tensor, hidden: Tensor
    ) -> Tensor:
        """Hidden states [R, d] of one more token of each row, at position `starts`; `hidden` has
        those of the tokens before."""
        places, size = [row.place for row in rows], self.shadow.kv.block_size
        states = self.replay and self.replay(places, starts, tokens)
        if states is None:
            batch = decode_batch(self.tables, size, places, starts, [0] * len(rows))
            states = self.model(replace(batch, input_ids=tokens), self.shadow.kv)
        return states

    def _logits(self, hidden: Tensor) -> Tensor:
        """[K, d] -> [K, V]"""
        return self.model.logits(hidden)
