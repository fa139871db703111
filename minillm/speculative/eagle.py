"""An EAGLE-3 layer (Li et al., 2025, arXiv 2503.01840): one layer that drafts from features.

    target         hidden states after three of its layers --fc--> feature g of each position
    token p        [embedding of x_p | g of p - 1] --layer--> a of p --norm, output matrix--> x_p+1
    next draft     [embedding of x_p+1 | a of p ] --layer--> ...    a takes the place of g

Its keys and values of position p are those of (x_p, g of p - 1), g before the first position is 0.
So a block depends on its own prefix alone, and the cache of the layer is kept like that of a draft
model (`shadow.py`). Positions of drafts were computed from a: they are computed again from g once
the target has accepted them. Embedding and output matrix are those of the target.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from minillm.cache.spec import cache_spec
from minillm.config import ModelConfig
from minillm.layers.attention import Attention
from minillm.layers.kv_cache import AttentionBackend, KVCache
from minillm.layers.linear import Embedding, Linear
from minillm.layers.mlp import MLP
from minillm.layers.norm import RMSNorm
from minillm.layers.rope import RotaryEmbedding
from minillm.models.all_layers import AllLayers
from minillm.models.batches import decode_batch
from minillm.models.decoder import Decoder, LayersMethod, allocate
from minillm.ops.batch import Batch
from minillm.ops.transfers import indices
from minillm.scheduling.plan import StepPlan
from minillm.speculative.draft_model import Chunk, DraftModel
from minillm.speculative.features import Features
from minillm.speculative.proposer import DraftRow
from minillm.speculative.shadow import Shadow


def layer_config(target: ModelConfig) -> ModelConfig:
    """The configuration of the layer: full grouped-query attention and a dense MLP."""
    return replace(
        target, num_layers=1, mla=None, moe=None, moe_layers=(), post_norm=False, rope_layers=(),
        sliding_windows=(),
    )  # fmt: skip


class DraftLayer(nn.Module, ABC):
    """A layer that drafts from features of the target.

    Attributes:
        config: of its attention and MLP.
        norm: what comes before the target's output matrix.
    """

    config: ModelConfig
    norm: RMSNorm

    @property
    def device(self) -> torch.device:
        """Device of the layer."""
        return self.norm.weight.device

    @abstractmethod
    def feature_of(self, target: Decoder) -> nn.Module:
        """The module that maps the hidden states [N, depths * d] of a target to features [N, d]."""

    @abstractmethod
    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: AttentionBackend
    ) -> Tensor:
        """Embeddings [N, d] and features of the positions before [N, d] -> a [N, d]."""

    def cache(self, features: Features, kv: KVCache) -> Shadow:
        """The layer's KV cache, in the blocks of `kv`, the target's, and always in its dtype."""
        pages, host, spec = features.pages, features.host, cache_spec(self.config)
        shape = pages.block_size, pages.dtype
        own = KVCache(spec, 1, pages.num_blocks, *shape, self.device, kv.mode)
        swap = host and KVCache(spec, 1, host.num_blocks, *shape, swap_space_of=self.device)
        return Shadow(own, swap)


class EagleLayer(DraftLayer):
    """`fc` and the layer. The names of its tensors are those of published EAGLE-3 checkpoints.

    Args:
        target: the configuration of the target.
        num_depths: number of the target's hidden states that make a feature.
        parallel: whether it has masks, to draft in parallel (`parallel_eagle.py`).
    """

    def __init__(
        self,
        target: ModelConfig,
        num_depths: int,
        dtype: torch.dtype,
        device: torch.device | str,
        parallel: bool = False,
    ):
        super().__init__()
        self.config = config = layer_config(target)
        prefix = "midlayer."
        d, eps = config.hidden_size, config.rms_norm_eps
        with torch.device("meta"):
            self.fc = Linear("", num_depths * d, {"fc": d})
            self.embedding_norm = RMSNorm(f"{prefix}input_layernorm", d, eps)
            self.feature_norm = RMSNorm(f"{prefix}hidden_norm", d, eps)
            self.attention = Attention(config, 0, f"{prefix}self_attn.")
            size = config.num_kv_heads * config.head_dim
            outputs = {"q_proj": config.num_heads * config.head_dim, "k_proj": size, "v_proj": size}
            wide = Linear(f"{prefix}self_attn.", 2 * d, outputs, config.qkv_bias)
            self.attention.qkv_proj = wide
            self.mlp_norm = RMSNorm(f"{prefix}post_attention_layernorm", d, eps)
            self.mlp = MLP(config, f"{prefix}mlp.")
            self.norm = RMSNorm("norm", d, eps)
            if parallel:
                self.mask = Embedding("mask", 2, d)  # an embedding and a feature
            length = config.max_position_embeddings
            self.rope = RotaryEmbedding(config.rope, config.rotary_dim, length, length)
        allocate(self, dtype, device)

    def feature_of(self, target: Decoder) -> nn.Module:
        return self.fc

    def forward(
        self, embedded: Tensor, features: Tensor, batch: Batch, kv: AttentionBackend
    ) -> Tensor:
        x = torch.cat((self.embedding_norm(embedded), self.feature_norm(features)), dim=-1)
        attended = self.attention(x, self.rope(batch.positions), batch, kv)
        x, residual = self.mlp_norm.add(attended, features)
        return self.mlp(x) + residual


def run_layers(
    layers: nn.ModuleList,
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    batch: Batch,
    kv: AttentionBackend,
    taps: dict[int, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """All layers, one by one. Entry n of `taps` becomes the hidden states [N, d] after n layers."""
    residual: Any = None
    for number, layer in enumerate(layers, start=1):
        x, residual = layer(x, residual, rope, batch, kv)
        if number in taps:
            taps[number] = x + residual
    return x, residual


class Taps(LayersMethod):
    """`Decoder.all_layers` of a target whose passes also store hidden states of their positions.

    Args:
        model: the target; this takes the place of its `all_layers`.
        depths: numbers of layers after which a hidden state is taken.
        features: where they are stored: in the slots of keys and values.
        kv: the target's KV cache. Passes over another cache store nothing.
    """

    def __init__(self, model: Decoder, depths: Sequence[int], features: Features, kv: KVCache):
        self.inner, self.layers = model.all_layers, model.layers
        self.features, self.kv = features, kv
        columns = features.states.chunk(len(depths), dim=1)  # of [slots, d] each
        self.pages = dict(zip(depths, columns, strict=True))

    def takes(self, kv: AttentionBackend, x: Tensor) -> TypeGuard[KVCache]:
        return kv is self.kv or (self.inner is not None and self.inner.takes(kv, x))

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: KVCache
    ) -> tuple[Tensor, Tensor]:
        if kv is not self.kv and self.inner is not None:
            return self.inner(x, rope, batch, kv)
        if isinstance(self.inner, AllLayers) and self.inner.takes(kv, x):
            return self.inner(x, rope, batch, kv, self.pages)
        taps: dict[int, Tensor | None] = dict.fromkeys(self.pages)
        done = run_layers(self.layers, x, rope, batch, kv, taps)
        states = torch.cat([state for state in taps.values() if state is not None], dim=-1)
        self.features.pages.write(0, states[:, None], None, batch)
        return done


class Eagle(DraftModel):
    """A proposer that drafts with an EAGLE layer or a multi-token prediction layer.

    Args:
        layer: the layer.
        target: the target, whose embedding and output matrix it uses.
        features: hidden states of all positions that the target has computed.
        shadow, max_num_tokens, coupled: as of `DraftModel`.
    """

    keeps_drafts = False

    def __init__(
        self,
        layer: DraftLayer,
        target: Decoder,
        features: Features,
        shadow: Shadow,
        max_num_tokens: int,
        coupled: bool = True,
    ):
        super().__init__(layer, shadow, features.tables, max_num_tokens, coupled)
        self.layer, self.target, self.features = layer, target, features
        self.feature = layer.feature_of(target)

    def allocated(self) -> dict[str, int]:
        pages = (self.shadow.kv, self.features.pages)
        host = (copies for copies in (self.shadow.host, self.features.host) if copies is not None)
        return {
            "draft_weights": sum(parameter.nbytes for parameter in self.layer.parameters()),
            "draft_kv_cache": sum(cache.num_bytes for cache in pages),
            "draft_swap_space": sum(copies.num_bytes for copies in host),
        }

    def follow(self, plan: StepPlan) -> None:
        """Apply the plan's block copies and swaps to the cache of the layer and to the features."""
        super().follow(plan)
        self.features.follow(plan)

    def _catch_up(self, chunks: Sequence[Chunk]) -> Tensor:
        batch = self._batch(chunks)
        return self._run(batch, self._features(chunks, batch.positions))

    def _features(self, chunks: Sequence[Chunk], positions: Tensor) -> Tensor:
        """Features [N, d] of the positions before those of the chunks, [N]; the first position of
        a sequence has none."""
        spans = [(row.place, max(start - 1, 0), end - max(start, 1)) for row, start, end in chunks]
        known = self.feature(self.features.read(spans))
        if any(start == 0 for _, start, _ in chunks):
            places = np.concatenate([np.arange(start, end) for _, start, end in chunks])
            features = known.new_zeros(len(positions), known.shape[1])
            features.index_copy_(0, indices(known.device, np.flatnonzero(places)), known)
            known = features
        return known

    def _next(
        self, rows: Sequence[DraftRow], starts: list[int], tokens: Tensor, hidden: Tensor
    ) -> Tensor:
        size, places = self.shadow.kv.block_size, [row.place for row in rows]
        batch = decode_batch(self.tables, size, places, starts, [0] * len(rows))
        return self._run(replace(batch, input_ids=tokens), hidden)

    def _run(self, batch: Batch, features: Tensor) -> Tensor:
        embedded = self.target.embedding(batch.input_ids)
        return self.layer(embedded, features, batch, self.shadow.kv)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(self.layer.norm(hidden))
