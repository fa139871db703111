"""Chapter 04: what a smaller cache costs, counted on the shapes of real models.

`made` counts the bytes of new tensors, `forms` what three ways to run MLA cost, `LatentWeights` is
an MLA layer taken apart. The trained models are in `ch04_variants`, the pictures in
`ch04_pictures`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minillm.config import MLAConfig, ModelConfig
from minillm.lab.training.attention import causal_rows
from minillm.lab.training.trainer import rows_batch
from minillm.models.decoder import Decoder, DecoderLayer
from minillm.models.presets import preset
from minillm.plan.cost import kv_bytes_per_token
from minillm_exercises.chapters.common import show_table as show_table
from minillm_exercises.errors import ExerciseError

# ---- counting --------------------------------------------------------------------------------


@dataclass
class Made:
    """Bytes of the tensors that were made, together and of the largest; a view costs none."""

    num_bytes: int = 0
    largest: int = 0


class _Maker(TorchDispatchMode):
    def __init__(self, found: Made) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        new = [tensor for tensor in _tensors(out) if _storage(tensor) not in known]
        self.found.num_bytes += sum(tensor.nbytes for tensor in new)
        self.found.largest = max([self.found.largest, *(tensor.nbytes for tensor in new)])
        return out


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def made() -> Iterator[Made]:
    """Count the bytes of all tensors that are made inside the block; `device="meta"` is enough."""
    found = Made()
    with _Maker(found):
        yield found


def by_hidden_size(config: ModelConfig, dtype: str = "bfloat16") -> Fraction:
    """How many times too much the rule "2 x layers x hidden size" makes of a token's cache."""
    values = 2 * config.num_layers * config.hidden_size
    return Fraction(2 * values, kv_bytes_per_token(config, dtype))


def prices(names: Sequence[str]) -> dict[str, tuple[int, Fraction]]:
    """Bytes of a token in 16-bit values by model, and `by_hidden_size`."""
    configs = {name: preset(name) for name in names}
    return {
        name: (kv_bytes_per_token(config, "bfloat16"), by_hidden_size(config))
        for name, config in configs.items()
    }


@dataclass(frozen=True)
class Form:
    """What attention of one step costs over all layers, from the queries' own products on:
    operations, bytes that it moves in 2-byte values, and values that a token keeps in a layer."""

    operations: int
    num_bytes: int
    kept: int


def forms(config: ModelConfig, queries: int, seq: int) -> dict[str, Form]:
    """Three ways for MLA to attend with the last `queries` of `seq` tokens.

    "keep K, V" expands new tokens once and keeps every head's key and value. "keep latents,
    expand" makes them all again in every step, written and read once. "keep latents, absorb"
    multiplies queries and outputs instead. Scores and outputs stay in the processor's cache.

    Raises:
        ExerciseError: the model has no latents, or a length is impossible.
    """
    mla = _latent_attention(config)
    if not 1 <= queries <= seq:
        raise ExerciseError(f"{queries} queries at the end of {seq} tokens: from 1 to {seq}.")
    heads, rank = config.num_heads, mla.kv_lora_rank
    key, value = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim
    up = heads * rank * (mla.qk_nope_head_dim + value)  # W_uk and W_uv
    full, latent = heads * (key + value), rank + mla.qk_rope_head_dim
    expanded = heads * (mla.qk_nope_head_dim + value)
    pairs = queries * seq - queries * (queries - 1) // 2
    over_heads, over_latents = 2 * pairs * full, 2 * pairs * heads * (latent + rank)
    found = {
        "keep K, V": Form(2 * queries * up + over_heads, up + seq * full, full),
        "keep latents, expand": Form(
            2 * seq * up + over_heads, up + seq * (latent + 2 * expanded), latent
        ),
        "keep latents, absorb": Form(2 * queries * up + over_latents, up + seq * latent, latent),
    }
    layers = config.num_layers
    return {
        name: Form(layers * form.operations, 2 * layers * form.num_bytes, form.kept)
        for name, form in found.items()
    }


def crossing(config: ModelConfig, seq: int) -> int:
    """The fewest new tokens with which expanding `seq` latents costs no more operations than
    absorbing."""
    for queries in range(1, seq + 1):
        found = forms(config, queries, seq)
        if found["keep latents, expand"].operations <= found["keep latents, absorb"].operations:
            return queries
    raise ExerciseError(f"{config.family} absorbs more cheaply with any number of new tokens.")


def _latent_attention(config: ModelConfig) -> MLAConfig:
    if config.mla is None:
        raise ExerciseError(f"The {config.family} configuration has no latent attention.")
    return config.mla


# ---- an MLA layer, taken apart ---------------------------------------------------------------


@dataclass(frozen=True)
class LatentWeights:
    """The matrices of one MLA layer by the paper's names, with the four widths that split them:
    heads H, a head's plain part Dn and rotated part Dr, the latent's rank R."""

    q: Tensor  # [H (Dn + Dr), d]
    down: Tensor  # [R + Dr, d]
    norm: Tensor  # [R]
    uk: Tensor  # [H, Dn, R]
    uv: Tensor  # [H, Dv, R]
    out: Tensor  # [d, H Dv]
    frequencies: Tensor  # [Dr / 2]
    widths: tuple[int, int, int, int]  # H, Dn, Dr, R


def latent_weights(model: Decoder) -> LatentWeights:
    """The weights of the first layer; its queries have no latent of their own."""
    mla, heads = _latent_attention(model.config), model.config.num_heads
    tensors, prefix = model.checkpoint_tensors(), "model.layers.0.self_attn."
    q, down, norm, up, out = (
        tensors[f"{prefix}{name}.weight"].target
        for name in ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    )
    uk, uv = up.view(heads, -1, mla.kv_lora_rank).split(
        (mla.qk_nope_head_dim, mla.v_head_dim), dim=1
    )
    exponent = torch.arange(0, mla.qk_rope_head_dim, 2) / mla.qk_rope_head_dim
    frequencies = (1 / model.config.rope.theta**exponent).to(up.dtype)
    widths = (heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank)
    return LatentWeights(q, down, norm, uk, uv, out, frequencies, widths)


@torch.no_grad()
def first_layer(model: Decoder, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What the first layer's attention reads for these tokens, and what it makes of it: [T, d]."""
    batch, layer = rows_batch(torch.tensor(ids), len(ids)), model.layers[0]
    if not isinstance(layer, DecoderLayer):
        raise ExerciseError(f"The first layer is a {type(layer).__name__}.")
    x = layer.input_norm(model.embedding(batch.input_ids))
    rope, rows = model.rope(batch.positions), causal_rows(model.config, len(ids))
    return x, layer.attention(x, rope, batch, rows)


def meta_step(config: ModelConfig, queries: int, seq: int) -> tuple[tuple[Tensor, ...], Any]:
    """Queries and cache of one layer, and its up-projections, of the right shapes without data."""
    mla, heads = _latent_attention(config), config.num_heads
    nope, rope, rank = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank
    shapes = ((heads, queries, nope), (heads, queries, rope), (seq, rank), (seq, rope))
    parts = tuple(torch.empty(shape, device="meta") for shape in shapes)
    up = (torch.empty(heads, width, rank, device="meta") for width in (nope, mla.v_head_dim))
    return parts, SimpleNamespace(**dict(zip(("uk", "uv"), up, strict=True)))
