"""Benchmarks of prompts: one long, several, many short; and of the ways to feed the kernel."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm_kernels.bench.case import Call, Measurement, sets_beyond_cache
from minillm_kernels.flash_attention import flash_attention
from minillm_kernels.flash_attention_config import (
    HOPPER,
    HOPPER_PLAIN,
    HOPPER_POINTERS,
    Config,
    entry,
)

FLASH, CUDNN, VARLEN = "SDPA flash", "SDPA cuDNN", "varlen_attn"


@dataclass(frozen=True)
class Size:
    """Causal self-attention of `num_sequences` prompts of `length`.

    Attributes:
        variant: which configuration, in words; empty for the launcher's choice.
        target: wanted share of the matrix units' measured rate.
    """

    num_sequences: int
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    variant: str = ""
    config: Config | None = None
    target: float | None = None
    peer_targets: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """For the table."""
        dims = f"{self.head_dim}" + f"/{self.value_dim}" * (self.value_dim != self.head_dim)
        name = (
            f"{self.num_sequences} x {self.length}, {self.num_heads}/{self.num_kv_heads} x {dims}"
        )
        name += f", window {self.window}" * (self.window is not None)
        return f"{name}, {self.variant}" if self.variant else name

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        seen = self.length if self.window is None else min(self.window, self.length)
        return self.num_sequences * (seen * (seen + 1) // 2 + (self.length - seen) * seen)

    @property
    def set_bytes(self) -> int:
        """Bytes of q, k, v and the result."""
        rows = self.num_sequences * self.length * (self.num_heads + self.num_kv_heads)
        return 2 * rows * (self.head_dim + self.value_dim)


LONG = Size(1, 16384, 32, 8, 128, 128, target=0.65, peer_targets={FLASH: 1.55, CUDNN: 0.92})
SMALL_HEADS = Size(1, 16384, 32, 8, 64, 64, peer_targets={FLASH: 1.35, CUDNN: 1.05})
SHORT = Size(32, 512, 32, 8, 128, 128, peer_targets={VARLEN: 1.2})
SIZES = (
    LONG,
    replace(LONG, num_sequences=4, length=4096),
    SMALL_HEADS,
    replace(SMALL_HEADS, num_sequences=4, length=4096),
    SHORT,
    Size(4, 4096, 16, 8, 128, 128),
    Size(4, 4096, 32, 32, 96, 96),
    Size(4, 4096, 8, 4, 256, 256),
    Size(4, 4096, 16, 16, 192, 128),
    Size(1, 16384, 32, 8, 128, 128, window=4096),
)
TOY = Size(2, 40, 2, 1, 16, 16, target=0.65, peer_targets={VARLEN: 1.2})
TINY = (TOY, replace(TOY, num_sequences=1, value_dim=24, window=7))


def with_variants(sizes: tuple[Size, ...]) -> list[Size]:
    """Each size by the launcher's choice, then in the three ways of a Hopper."""
    found = list(sizes)
    for size in sizes:
        for variant, table in (
            ("specialised", HOPPER),
            ("descriptors", HOPPER_PLAIN),
            ("pointers", HOPPER_POINTERS),
        ):
            config = entry(table, size.head_dim, size.value_dim)
            found.append(
                replace(size, variant=variant, config=config, target=None, peer_targets={})
            )
    return found


def measurements(tiny: bool = False) -> list[Measurement]:
    """The targets of one H200 and their neighbours; `tiny` ones at toy sizes on the CPU."""
    if tiny:
        return [measurement(size, "cpu") for size in (*TINY, *with_variants((TOY,))[1:])]
    compared = with_variants((LONG, SMALL_HEADS, SHORT))[3:]
    return [measurement(size, "cuda") for size in (*SIZES, *compared)]


def measurement(size: Size, device: str) -> Measurement:
    """Tensors are made at the first call, so that a list of measurements costs no memory."""
    sets = Sets(size, device)
    return Measurement(
        family="flash_attention",
        name=size.name,
        run=sets.ours,
        num_bytes=size.set_bytes,
        num_flops=2 * size.num_heads * (size.head_dim + size.value_dim) * size.num_pairs,
        bound="matmul",
        peers={} if size.variant else sets.peers(),
        num_sets=sets.count,
        target=size.target,
        peer_targets=size.peer_targets,
    )


class Sets:
    """The tensors of a measurement, several sets of them where one would fit into the cache."""

    def __init__(self, size: Size, device: str):
        self.size, self.device = size, device
        self.count = sets_beyond_cache(size.set_bytes) if device == "cuda" else 2
        self.made: list[tuple[Tensor, Tensor, Tensor]] = []
        self.start = torch.empty(0)

    def inputs(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [N, H, D], k [N, Hkv, D], v [N, Hkv, Dv] of one set, random: zeros take less power."""
        size = self.size
        rows = size.num_sequences * size.length
        if not self.made:
            bounds = torch.arange(size.num_sequences + 1, dtype=torch.int32) * size.length
            self.start = bounds.to(self.device)
            for _ in range(self.count):
                shapes = (
                    (rows, size.num_heads, size.head_dim),
                    (rows, size.num_kv_heads, size.head_dim),
                    (rows, size.num_kv_heads, size.value_dim),
                )
                q, k, v = (
                    torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_()
                    for shape in shapes
                )
                self.made.append((q, k, v))
        return self.made[number % self.count]

    def ours(self, number: int) -> Tensor:
        """The kernel."""
        q, k, v = self.inputs(number)
        return flash_attention(
            q,
            k,
            v,
            self.start,
            self.start,
            self.size.head_dim**-0.5,
            window=self.size.window,
            config=self.size.config,
        )

    def peers(self) -> dict[str, Call]:
        """torch's own kernels, those that know this case."""
        if self.size.window is not None:
            return {VARLEN: self.varlen}
        backends = torch.nn.attention.SDPBackend
        return {
            FLASH: self.sdpa(backends.FLASH_ATTENTION),
            CUDNN: self.sdpa(backends.CUDNN_ATTENTION),
            VARLEN: self.varlen,
        }

    def sdpa(self, backend: torch.nn.attention.SDPBackend) -> Call:
        """`scaled_dot_product_attention` by one backend, the same memory seen as [B, H, T, D]."""

        def run(number: int) -> Tensor:
            q, k, v = (
                tensor.unflatten(0, (self.size.num_sequences, -1)).transpose(1, 2)
                for tensor in self.inputs(number)
            )
            with torch.nn.attention.sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return run

    def varlen(self, number: int) -> Tensor:
        """torch's FlashAttention over flat batches."""
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = self.inputs(number)
        length, window = self.size.length, self.size.window
        found = varlen_attn(
            q,
            k,
            v,
            self.start,
            self.start,
            length,
            length,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
        )
        return found if isinstance(found, Tensor) else found[0]
