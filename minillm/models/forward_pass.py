"""The forward pass without a scheduler: any tokens, over any KV cache.

Lessons, tests and benchmarks use it. The engine does not:
`execution/runner.py` builds its batches from step plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from minillm.cache.spec import cache_spec
from minillm.layers.kv_cache import KVCache
from minillm.models.decoder import Decoder
from minillm.ops.batch import Batch


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence to compute now: positions `start` to `start + len(token_ids)`."""

    block: int  # the block of the sequence's keys and values
    start: int
    token_ids: Sequence[int]


class ForwardPass:
    """Runs a model over caller-allocated KV caches in which each block holds a whole sequence."""

    def __init__(self, model: Decoder):
        self.model = model
        self.dtype, self.device = model.dtype, model.device

    def allocate(self, num_sequences: int, num_positions: int) -> KVCache:
        """Allocate a KV cache for `num_sequences` sequences of `num_positions` positions. On a GPU
        blocks are powers of two: attention kernels compile anew for each size of a block."""
        config = self.model.config
        if self.device.type != "cpu":
            num_positions = 1 << (num_positions - 1).bit_length()
        return KVCache(
            cache_spec(config),
            config.num_layers,
            num_sequences,
            num_positions,
            self.dtype,
            self.device,
            "plain" if self.model.plain_torch else "fast",
        )

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], kv: KVCache) -> tuple[Tensor, Tensor]:
        """Compute the tokens of all chunks in one pass, and write their keys and values to `kv`.

        Returns hidden states [N, d] and the logits [B, V] after each chunk's last token.
        """
        batch = self.batch(chunks, kv.block_size)
        with torch.accelerator.device_index(self.device.index):  # the device of kernel launches
            hidden = self.model(batch, kv)
            return hidden, self.model.logits(hidden[batch.logits_indices])

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [K, V] of hidden states [K, d]."""
        with torch.accelerator.device_index(self.device.index):
            return self.model.logits(hidden)

    def batch(self, chunks: Sequence[Chunk], block_size: int) -> Batch:
        """The flat batch of these chunks."""
        lengths = [len(chunk.token_ids) for chunk in chunks]
        starts = [0, *accumulate(lengths)]
        positions = [
            position
            for chunk in chunks
            for position in range(chunk.start, chunk.start + len(chunk.token_ids))
        ]
        blocks = [chunk.block for chunk in chunks for _ in chunk.token_ids]
        slots = [b * block_size + p for b, p in zip(blocks, positions, strict=True)]

        def tensor(values: Sequence, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return Batch(
            input_ids=tensor([token for chunk in chunks for token in chunk.token_ids]),
            positions=tensor(positions),
            slot_mapping=tensor(slots),
            query_start=tensor(starts, torch.int32),
            seq_lens=tensor([c.start + len(c.token_ids) for c in chunks], torch.int32),
            block_tables=tensor([[chunk.block] for chunk in chunks]),
            logits_indices=tensor([start - 1 for start in starts[1:]]),
            max_query_len=max(lengths),
        )
