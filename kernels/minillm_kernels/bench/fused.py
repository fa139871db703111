"""Benchmarks of what only moves memory, at the sizes of a long prompt and of one decoded token."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import fused, reference
from minillm_kernels.bench import case
from minillm_kernels.bench.case import Bound

EPS = 1e-6
BLOCK_SIZE = 16
DECODE = 256  # tokens up to which a call is too short for bandwidth to matter


@dataclass(frozen=True)
class Size(case.Size):
    """One operation on N tokens; `shape` is what else it needs to know: the width of a row, of a
    projection (H, Hkv, D)."""

    op: str
    num_tokens: int
    shape: tuple[int, ...]
    norm: bool = True

    @property
    def num_bytes(self) -> int:
        """Everything read and written once, in bfloat16; angles are float32."""
        if self.op == "norm_rope_write":
            heads, kv_heads, dim = self.shape
            return self.num_tokens * (4 * (heads + 2 * kv_heads) * dim + 4 * dim)
        passes = {"rms_norm": 2, "add_rms_norm": 4, "silu_mul": 3, "embedding": 2}[self.op]
        return 2 * passes * self.num_tokens * self.shape[0]

    @property
    def name(self) -> str:
        """What is computed."""
        return f"{self.op} N={self.num_tokens} {'x'.join(map(str, self.shape))}"

    @property
    def bound(self) -> Bound:
        """Memory; few rows are in the cache."""
        return "latency" if self.num_tokens <= DECODE else "copy"

    def run(self, inputs: tuple[object, ...]) -> object:
        """The kernel."""
        return getattr(fused, self.op)(*inputs)

    def peers(self) -> Mapping[str, Callable[[Any], object]]:
        """torch, operation by operation."""
        return {"torch": lambda inputs: getattr(reference, self.op)(*inputs)}

    def make(self, device: str, number: int) -> tuple[object, ...]:
        """The positional arguments of the launcher, which are the reference's."""
        rows, tokens = self.num_tokens, 9 if device == "cpu" else 128256

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=device)

        if self.op == "norm_rope_write":
            return projection(self, normal, device)
        (width,) = self.shape
        if self.op == "embedding":
            return torch.randint(tokens, (rows,), device=device), normal(tokens, width)
        if self.op == "silu_mul":
            return (normal(rows, 2 * width),)
        inputs = [normal(rows, width) for _ in range(2 if self.op == "add_rms_norm" else 1)]
        return *inputs, normal(width), EPS


def projection(size: Size, normal: Callable[..., Tensor], device: str) -> tuple[object, ...]:
    """Tokens of one sequence in a cache with room for them and some more."""
    (heads, kv_heads, dim), rows = size.shape, size.num_tokens
    weight = normal(dim) if size.norm else None
    turns = torch.rand(rows, dim // 2, device=device) * 6.28
    num_blocks = -(-rows // BLOCK_SIZE) + 1
    caches = [normal(num_blocks, kv_heads, BLOCK_SIZE, dim) for _ in "kv"]
    blocks = torch.randperm(num_blocks)[: -(-rows // BLOCK_SIZE)].unsqueeze(1)
    slots = (blocks * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:rows].to(device)
    qkv = normal(rows, heads + 2 * kv_heads, dim)
    return qkv, weight, weight, EPS, turns.cos(), turns.sin(), False, *caches, slots


SIZES = (
    Size("add_rms_norm", 16384, (4096,), target=0.96),
    Size("add_rms_norm", 65536, (1024,), target=0.96),
    Size("add_rms_norm", 16384, (5120,), target=0.96),
    Size("rms_norm", 16384, (8192,), target=0.96),
    Size("silu_mul", 8192, (14336,), target=0.96),
    Size("silu_mul", 65536, (768,), target=0.96),
    Size("embedding", 32768, (4096,)),
    Size("norm_rope_write", 16384, (32, 8, 128), norm=False),  # Llama-3.1-8B
    Size("norm_rope_write", 16384, (16, 8, 128)),  # Qwen3-0.6B
    Size("add_rms_norm", 1, (4096,)),
    Size("silu_mul", 1, (14336,)),
    Size("norm_rope_write", 1, (32, 8, 128), norm=False),
    Size("norm_rope_write", 64, (16, 8, 128)),
)
TINY = (
    Size("add_rms_norm", 3, (48,), target=0.96),
    Size("rms_norm", 3, (48,)),
    Size("silu_mul", 3, (48,)),
    Size("embedding", 3, (48,)),
    Size("norm_rope_write", 3, (4, 2, 16)),
)
