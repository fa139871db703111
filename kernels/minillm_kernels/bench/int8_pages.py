"""Benchmarks of attention over pages of 8-bit codes, beside our own over pages of 16 bits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm_kernels import int8_pages
from minillm_kernels.bench import paged_attention as plain
from minillm_kernels.bench.case import Measurement, Sets, sets_beyond_cache

MANY, LONG = ((1, 4096),) * 64, ((1, 32768),)
SIZES = (
    plain.Size("decode 64 x 4k", MANY, peer_targets={"bf16": 1.67}),
    plain.Size("decode 1 x 32k", LONG, peer_targets={"bf16": 1.67}),
    plain.Size("verify 5 of 64 x 4k", ((5, 4096),) * 64),
    plain.Size("prefill 2k behind 14k", ((2048, 16384),), bound="matmul"),
)
TINY = (
    plain.Size("toy decode", ((1, 40), (1, 9)), **plain.TOY),
    plain.Size("toy mixed", ((1, 40), (5, 20)), **plain.TOY),
)


@dataclass(frozen=True)
class Both:
    """A batch, and the same pages as codes."""

    batch: plain.Batch
    codes: tuple[Tensor, Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, batch: plain.Batch) -> "Both":
        """Quantise every page of the batch."""
        blocks, _, size, _ = batch.k_cache.shape
        key, value = (x.transpose(1, 2).flatten(0, 1) for x in (batch.k_cache, batch.v_cache))
        scale = batch.k_cache.new_empty(batch.k_cache.shape[:3], dtype=torch.float16)
        code = torch.empty_like(batch.k_cache, dtype=torch.uint8)
        codes = (code, torch.empty_like(code, dtype=torch.int8), scale, torch.empty_like(scale))
        slots = torch.arange(blocks * size, device=key.device)
        int8_pages.write_cache(key, value, *codes, slots)
        return cls(batch, codes)

    def ours(self) -> Tensor:
        """The kernel."""
        where = self.batch.query_start, self.batch.seq_lens, self.batch.block_tables
        return int8_pages.paged_attention(
            self.batch.q, *self.codes, *where, self.batch.scale,
            max_query_len=self.batch.size.longest,
        )  # fmt: skip


def num_bytes(size: plain.Size) -> int:
    """Codes and scales once; queries and results."""
    pages = sum(length for _, length in size.sequences) * size.num_kv_heads
    return 2 * pages * (size.head_dim + 2) + 4 * size.num_rows * size.num_heads * size.head_dim


def measurements(tiny: bool = False) -> list[Measurement]:
    """The targets of one H200; `tiny` ones at toy sizes on the CPU."""
    return [measurement(size, "cpu" if tiny else "cuda") for size in (TINY if tiny else SIZES)]


def measurement(size: plain.Size, device: str) -> Measurement:
    """The peer is attention over pages of 16 bits."""
    count = 1 if device == "cpu" else sets_beyond_cache(num_bytes(size))
    sets = Sets(lambda number: Both.of(plain.batch(size, device)), count)
    return Measurement(
        family="int8_pages",
        name=size.name,
        run=sets.call(Both.ours),
        num_bytes=num_bytes(size),
        num_flops=size.num_flops,
        bound=size.bound,  # type: ignore[arg-type]
        peers={"bf16": sets.call(lambda both: plain.ours(both.batch))},
        num_sets=sets.count,
        peer_targets=size.peer_targets,
    )
