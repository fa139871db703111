"""All layers of a decoder in one C call (`c/layers.c`), for models whose weights are in panels.
With tensor parallelism there is one call per half layer, followed by an all-reduce.

Addresses of weights and KV cache are stored once. Each step adds the addresses of its batch, and
uses one allocation for all intermediate results.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import Structure, addressof, byref, c_float, c_int64, c_void_p, memmove
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from minillm.ops import cpu
from minillm.ops.batch import Pages, Tails, codes_of
from minillm.ops.cpu_checks import check_batch, check_rope
from minillm.ops.cpu_experts import ExpertShape, ExpertWeights
from minillm.ops.cpu_int8_cache import Int8Pages
from minillm.ops.cpu_latent import LatentShape, LatentWeights
from minillm.ops.cpu_quantized import MatrixParts
from minillm.ops.cpu_structures import address, filled, structure_of
from minillm.ops.cpu_tails import tails_in_c

ALIGNMENT = 64  # bytes, a cache line
ATTENTION, MLP = 1, 2  # the halves of a layer, as in layers.c
NO_TAPS: Mapping[int, Tensor] = {}


@dataclass(frozen=True)
class LayerWeights:
    """One layer (`layer` of layers.h): matrices in panels, plain or quantised; norms and biases
    unpacked; its KV cache.

    With MLA, `latent` takes the place of qkv and the norms of heads; in a mixture of experts,
    `experts` that of gate_up and down. `codes` are given in place of a 16-bit cache.
    """

    input_norm: Tensor
    mlp_norm: Tensor
    qkv: MatrixParts | None
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: MatrixParts
    o_bias: Tensor | None
    gate_up: MatrixParts | None
    gate_up_bias: Tensor | None
    down: MatrixParts | None
    down_bias: Tensor | None
    k_cache: Tensor | None = None
    v_cache: Tensor | None = None
    codes: Int8Pages | None = None
    window: int = 0  # 0: none
    latent: LatentWeights | None = None
    experts: ExpertWeights | None = None


@dataclass(frozen=True)
class LayerShape:
    """The common shape of all layers. Sizes of heads are not used with MLA (`latent`), nor is
    `intermediate` if all layers are mixtures of experts."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    interleaved: bool
    eps: float
    qk_eps: float
    scale: float
    latent: LatentShape | None = None
    experts: ExpertShape | None = None

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rope

    @property
    def fits(self) -> bool:
        """Whether the C functions support these sizes."""
        if self.experts is not None and not self.experts.fits:
            return False
        if self.latent is not None:
            return self.latent.fits and self.intermediate % cpu.PANEL_STEP == 0
        if self.head_dim > cpu.MOST_HEAD_DIM or self.intermediate % cpu.PANEL_STEP:
            return False
        return cpu.fits_vectors(self.heads // self.kv_heads, self.head_dim, self.head_dim)


class _Shape(Structure):
    _fields_ = (
        *((name, c_int64) for name in (
            "hidden", "heads", "kv_heads", "head_dim", "intermediate", "interleaved",
            "num_blocks", "block_size",
        )),
        ("cache_strides", c_int64 * 6),
        *((name, c_float) for name in ("eps", "qk_eps", "scale")),
        *((name, c_void_p) for name in ("latent", "experts")),
    )  # fmt: skip


class _Step(Structure):
    _fields_ = (
        *((name, c_int64) for name in (
            "n", "sequences", "num_slots", "columns", "max_query_len",
        )),
        *((name, c_void_p) for name in (
            "cos", "sin", "slots", "query_start", "seq_lens", "tables",
        )),
        ("table_stride", c_int64),
        *((name, c_void_p) for name in (
            "tails", "x", "residual", "normed", "wide", "narrow", "attended", "memory", "taps",
        )),
        ("tap_stride", c_int64),
    )  # fmt: skip


class Layers:
    """The layers of a model with a KV cache [layers, blocks, Hkv, block_size, D]."""

    def __init__(
        self,
        weights: Sequence[LayerWeights],
        shape: LayerShape,
        keys: Tensor,
        values: Tensor,
        pages: Sequence[Pages] = (),
    ):
        if not shape.fits:
            raise ValueError(f"{shape} is not supported in C; check `fits` first.")
        self.weights, self.shape = weights, shape  # keeps the weights alive
        self.keys, self.values = keys, values
        self.dtype = weights[0].input_norm.dtype
        codes = [codes_of(page) for page in pages] or [None] * len(weights)  # of 8-bit caches
        self._parts = [  # keeps what the layers point to alive
            filled(replace(layer, k_cache=key, v_cache=value, codes=codes and Int8Pages.of(*codes)))
            for layer, key, value, codes in zip(weights, keys, values, codes, strict=True)
        ]
        self._layers = (structure_of(LayerWeights) * len(weights))(*self._parts)
        self._latent = None if shape.latent is None else filled(shape.latent)
        self._experts = None if shape.experts is None else filled(shape.experts)
        self._shape = _Shape(
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.intermediate,
            shape.interleaved,
            keys.shape[1],
            keys.shape[3],
            (c_int64 * 6)(*keys[0].stride()[:3], *values[0].stride()[:3]),
            shape.eps,
            shape.qk_eps,
            shape.scale,
            address(self._latent),
            address(self._experts),
        )
        query = 0 if shape.latent else shape.heads * shape.head_dim
        wide = query and query + 2 * shape.kv_heads * shape.head_dim
        narrow = max(query, shape.intermediate)
        self._widths = shape.hidden, wide, narrow, query
        self._tapped, self._table = NO_TAPS, (c_void_p * 0)()  # the last `taps`, and their pages
        self._spare: list[Tensor] = []  # reused between steps, because new pages must be zeroed

    def run(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        max_query_len: int,
        all_reduce: Callable[[Tensor], object] | None = None,
        taps: Mapping[int, Tensor] = NO_TAPS,
        tails: Tails | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [N, d] -> the last MLP's output and the residual stream, both [N, d]. Their
        sum after n layers is stored in the slots of entry n of `taps`, [slots, d].

        With tensor parallelism, the output [N, d] of attention and of the MLP is a partial sum;
        `all_reduce` is called on it after each half layer and adds the ranks' sums in place. Only
        one rank may have the biases of o and down.
        """
        count = len(x)
        if block_tables.stride(1) != 1:
            block_tables = block_tables.contiguous()
        check_batch(slot_mapping, query_start, seq_lens, block_tables)
        check_rope(rope, count, self.shape.rotary_dim)
        x = _copied(x)
        residual = torch.empty_like(x)
        memory = self._take(count)
        cos, sin = rope[0].contiguous(), rope[1].contiguous()
        tree = tails_in_c(tails, len(seq_lens))
        step = _Step(
            count,
            len(seq_lens),
            len(slot_mapping),
            block_tables.shape[1],
            max_query_len,
            cos.data_ptr(),
            sin.data_ptr(),
            slot_mapping.data_ptr(),
            query_start.data_ptr(),
            seq_lens.data_ptr(),
            block_tables.data_ptr(),
            block_tables.stride(0),
            address(tree),
            x.data_ptr(),
            residual.data_ptr(),
            *self._buffers(memory, count),
            *self._pages(taps),
        )
        run = cpu.ready(self.dtype).run_layers
        for first, last, halves in self._calls(all_reduce is not None):
            status = run(self._layers, first, last, halves, byref(self._shape), byref(step))
            cpu.raise_for(status, self.keys[0], count)
            if all_reduce is not None:
                all_reduce(x)
        if taps and len(self.weights) in taps:
            taps[len(self.weights)].index_copy_(0, slot_mapping, x + residual)
        self._spare = [memory]
        return x, residual

    def _pages(self, taps: Mapping[int, Tensor]) -> tuple[int | None, int]:
        """The address of a table of the addresses of `taps`, and their stride."""
        if taps and taps is not self._tapped:
            self._tapped, count = taps, len(self.weights)
            pages = [taps[i].data_ptr() if i in taps else None for i in range(count)]
            self._table = (c_void_p * count)(*pages)
        return (addressof(self._table), next(iter(taps.values())).stride(0)) if taps else (None, 0)

    def _calls(self, by_halves: bool) -> list[tuple[int, int, int]]:
        """(first layer, end layer, halves) of each C call."""
        count = len(self.weights)
        if not by_halves:
            return [(0, count, ATTENTION | MLP)]
        return [(i, i + 1, half) for i in range(count) for half in (ATTENTION, MLP)]

    def _take(self, count: int) -> Tensor:
        """Memory for intermediate results, not shared with a concurrent step."""
        size = sum(self._sizes(count))
        spare, self._spare = self._spare, []
        fits = bool(spare) and size <= len(spare[0])
        return spare[0] if fits else torch.empty(size, dtype=self.dtype)

    def _buffers(self, memory: Tensor, count: int) -> Iterator[int]:
        """Addresses of the buffers normed, wide, narrow and attended, each [N, width], and of the
        memory for MLA and experts."""
        ends = accumulate(self._sizes(count), initial=0)
        return (memory.data_ptr() + end * self.dtype.itemsize for end in list(ends)[:-1])

    def _sizes(self, count: int) -> list[int]:
        unit = ALIGNMENT // self.dtype.itemsize
        sizes = [count * width for width in self._widths]
        sizes.append(self._bytes_of_parts(count) // self.dtype.itemsize)
        return [-(-size // unit) * unit for size in sizes]

    def _bytes_of_parts(self, count: int) -> int:
        """Bytes that MLA and experts need, which they use in turn."""
        latent, experts = self._latent, self._experts
        if latent is None and experts is None:
            return 0
        c = cpu.ready(self.dtype)
        return max(
            0 if latent is None else c.latent_memory(byref(latent), count),
            0 if experts is None else c.expert_memory(byref(experts), count),
        )


def _copied(x: Tensor) -> Tensor:
    """A contiguous copy, by one thread: torch's threads would compete with those of C."""
    x = x.contiguous()
    out = torch.empty_like(x)
    memmove(out.data_ptr(), x.data_ptr(), x.nbytes)
    return out
