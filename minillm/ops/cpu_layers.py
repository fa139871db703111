"""All layers of a decoder in one C call (`c/layers.c`), for models whose weights are in panels.
With tensor parallelism there is one call per half layer, followed by an all-reduce.

Addresses of weights and KV cache are stored once. Each step adds the addresses of its batch, and
uses one allocation for all intermediate results.
"""

from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p, memmove
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from minillm.ops import cpu
from minillm.ops.c_library import library

ALIGNMENT = 64  # bytes, a cache line
ATTENTION, MLP = 1, 2  # the halves of a layer, as in layers.c


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer: matrices in panels, norms and biases unpacked."""

    input_norm: Tensor
    mlp_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    window: int | None


@dataclass(frozen=True)
class LayerShape:
    """The common shape of all layers."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    interleaved: bool
    eps: float
    qk_eps: float
    scale: float

    @property
    def fits(self) -> bool:
        """Whether the C functions support these sizes."""
        if self.head_dim > cpu.MOST_HEAD_DIM or self.intermediate % cpu.PANEL_STEP:
            return False
        return cpu.fits_vectors(self.heads // self.kv_heads, self.head_dim, self.head_dim)


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in (
            "input_norm", "mlp_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias",
            "gate_up", "gate_up_bias", "down", "down_bias", "k_cache", "v_cache",
        )),
        ("window", c_int64),
    )  # fmt: skip


class _Shape(Structure):
    _fields_ = (
        *((name, c_int64) for name in (
            "hidden", "heads", "kv_heads", "head_dim", "intermediate", "interleaved",
            "num_blocks", "block_size",
        )),
        ("cache_strides", c_int64 * 6),
        *((name, c_float) for name in ("eps", "qk_eps", "scale")),
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
            "x", "residual", "normed", "wide", "narrow", "attended",
        )),
    )  # fmt: skip


class Layers:
    """The layers of a model with a KV cache [layers, blocks, Hkv, block_size, D]."""

    def __init__(
        self, weights: Sequence[LayerWeights], shape: LayerShape, keys: Tensor, values: Tensor
    ):
        if not shape.fits:
            raise ValueError(f"{shape} is not supported in C; check `fits` first.")
        self.weights, self.shape = weights, shape  # keeps the weights alive
        self.keys, self.values = keys, values
        self.dtype = weights[0].qkv.dtype
        built = library(dict(cpu.ELEMENTS)[self.dtype])
        self._run = built.run_layers  # type: ignore[union-attr]
        self._run.restype = c_int64
        which = c_int64, c_int64, c_int64
        self._run.argtypes = (POINTER(_Layer), *which, POINTER(_Shape), POINTER(_Step))
        self._layers = (_Layer * len(weights))(
            *(_layer(each, keys[i], values[i]) for i, each in enumerate(weights))
        )
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
        )
        heads = shape.heads + 2 * shape.kv_heads
        wide, narrow = heads * shape.head_dim, max(shape.heads * shape.head_dim, shape.intermediate)
        self._widths = shape.hidden, wide, narrow, narrow
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
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [N, d] -> the last MLP's output and the residual stream, both [N, d].

        With tensor parallelism, the output [N, d] of attention and of the MLP is a partial sum;
        `all_reduce` is called on it after each half layer and adds the ranks' sums in place. Only
        one rank may have the biases of o and down.
        """
        count = len(x)
        if block_tables.stride(1) != 1:
            block_tables = block_tables.contiguous()
        cpu.check_batch(slot_mapping, query_start, seq_lens, block_tables)
        cpu.check_rope(rope, count, self.shape.head_dim)
        x = _copied(x)
        residual = torch.empty_like(x)
        memory = self._take(count)
        cos, sin = rope[0].contiguous(), rope[1].contiguous()
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
            x.data_ptr(),
            residual.data_ptr(),
            *self._parts(memory, count),
        )
        cpu.ready(self.dtype)
        for first, last, halves in self._calls(by_halves=all_reduce is not None):
            status = self._run(self._layers, first, last, halves, byref(self._shape), byref(step))
            cpu.raise_for(status, self.keys[0], count)
            if all_reduce is not None:
                all_reduce(x)
        self._spare = [memory]
        return x, residual

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

    def _parts(self, memory: Tensor, count: int) -> Iterator[int]:
        """Addresses of the buffers normed, wide, narrow and attended, each [N, width]."""
        ends = accumulate(self._sizes(count), initial=0)
        return (memory.data_ptr() + end * self.dtype.itemsize for end in list(ends)[:-1])

    def _sizes(self, count: int) -> list[int]:
        unit = ALIGNMENT // self.dtype.itemsize
        return [-(-count * width // unit) * unit for width in self._widths]


def _copied(x: Tensor) -> Tensor:
    """A contiguous copy, by one thread: torch's threads would compete with those of C."""
    x = x.contiguous()
    out = torch.empty_like(x)
    memmove(out.data_ptr(), x.data_ptr(), x.nbytes)
    return out


def _layer(weights: LayerWeights, keys: Tensor, values: Tensor) -> _Layer:
    """The addresses of one layer."""
    w = weights
    tensors = (
        w.input_norm,
        w.mlp_norm,
        w.qkv,
        w.qkv_bias,
        w.q_norm,
        w.k_norm,
        w.o,
        w.o_bias,
        w.gate_up,
        w.gate_up_bias,
        w.down,
        w.down_bias,
        keys,
        values,
    )
    return _Layer(*(None if each is None else each.data_ptr() for each in tensors), w.window or 0)
