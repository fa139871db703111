"""Benchmarks of attention over pages of 8-bit codes, beside our own over pages of 16 bits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import int8_pages
from minillm_kernels.bench import paged_attention as plain


@dataclass(frozen=True)
class Size(plain.Size):
    """A call with codes."""

    @property
    def num_bytes(self) -> int:
        """Codes and scales once; queries and results."""
        pages = self.num_positions * self.num_kv_heads
        return 2 * pages * (self.head_dim + 2) + 4 * self.num_rows * self.num_heads * self.head_dim

    def make(self, device: str, number: int) -> Any:
        """A batch, and its pages as codes."""
        batch = super().make(device, number)
        blocks, _, size, _ = batch.k_cache.shape
        key, value = (x.transpose(1, 2).flatten(0, 1) for x in (batch.k_cache, batch.v_cache))
        scale = batch.k_cache.new_empty(batch.k_cache.shape[:3], dtype=torch.float16)
        code = torch.empty_like(batch.k_cache, dtype=torch.uint8)
        codes = (code, torch.empty_like(code, dtype=torch.int8), scale, torch.empty_like(scale))
        slots = torch.arange(blocks * size, device=key.device)
        int8_pages.write_cache(key, value, *codes, slots)
        return batch, codes

    def run(self, inputs: Any) -> Tensor:
        """The kernel."""
        batch: plain.Batch = inputs[0]
        codes: tuple[Tensor, Tensor, Tensor, Tensor] = inputs[1]
        return int8_pages.paged_attention(
            batch.q, *codes, *batch.tables, self.scale, max_query_len=self.longest
        )

    def peers(self) -> Mapping[str, Callable[[Any], object]]:
        """Attention over pages of 16 bits."""
        return {"bf16": lambda inputs: super(Size, self).run(inputs[0])}


MANY, LONG = ((1, 4096),) * 64, ((1, 32768),)
SIZES = (
    Size("decode 64 x 4k", MANY, peer_targets={"bf16": 1.67}),
    Size("decode 1 x 32k", LONG, peer_targets={"bf16": 1.67}),
    Size("verify 5 of 64 x 4k", ((5, 4096),) * 64),
    Size("prefill 2k behind 14k", ((2048, 16384),), bound="matmul"),
)
TINY = (
    Size("toy decode", ((1, 40), (1, 9)), **plain.TOY),
    Size("toy mixed", ((1, 40), (5, 20)), **plain.TOY),
)
