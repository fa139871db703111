"""From a plan of what to compute to hidden states: builds the flat batch and runs the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from minillm.layers.batch import Batch
from minillm.layers.kv_cache import KVCache, cache_spec
from minillm.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one sequence to compute now: positions `start` to `start + len(token_ids)`."""

    block: int  # where the sequence's keys and values are
    start: int
    token_ids: Sequence[int]


class Runner:
    """Owns the model and the cache. One block holds one whole sequence."""

    def __init__(self, model: Decoder):
        self.model = model
        weight = model.embedding.weight
        self.dtype, self.device = weight.dtype, weight.device
        self.kv: KVCache | None = None

    def allocate(self, num_sequences: int, num_positions: int) -> None:
        """A cache for this many sequences of this many positions; what it held is dropped."""
        self.kv = None  # before the new one, so that both never exist together
        config = self.model.config
        self.kv = KVCache(
            cache_spec(config),
            config.num_layers,
            num_sequences,
            num_positions,
            self.dtype,
            self.device,
        )

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the chunks' tokens, all in one pass. Returns hidden states [N, d]."""
        if self.kv is None:
            raise RuntimeError("allocate() comes before run()")
        return self.model(self.batch(chunks, self.kv.block_size), self.kv)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[K, d] -> [K, V]"""
        return self.model.logits(hidden)

    @torch.inference_mode()
    def copy(self, source: int, target: int) -> None:
        """Give the sequence in block `target` the past of the one in `source`."""
        if self.kv is not None:
            self.kv.copy_block(source, target)

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
