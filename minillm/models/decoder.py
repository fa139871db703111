"""The decoder-only transformer. All model families use it, with different `ModelConfig`s."""

from collections.abc import Callable
from typing import Protocol, TypeGuard

import torch
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.layers.attention import Attention
from minillm.layers.kv_cache import AttentionBackend, KVCache
from minillm.layers.linear import Embedding, Linear
from minillm.layers.linear_methods import CheckpointTensor, LinearMethod, Matrix, frozen
from minillm.layers.mla import MLAttention
from minillm.layers.mlp import MLP
from minillm.layers.moe import ExpertNames, MoE, Router
from minillm.layers.norm import RMSNorm
from minillm.layers.post_norm import PostNormLayer
from minillm.layers.rope import RotaryEmbedding
from minillm.models.merged import merge
from minillm.ops.batch import Batch

MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe.", "w1", "w3", "w2")

MethodOf = Callable[[Matrix], LinearMethod]  # selects the storage of each matrix


class LayersMethod(Protocol):
    """All layers of a decoder in one call."""

    def takes(self, kv: AttentionBackend, x: Tensor) -> TypeGuard[KVCache]:
        """Whether it computes this step; otherwise the layers run one by one."""

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: KVCache
    ) -> tuple[Tensor, Tensor]:
        """[N, d] -> two of [N, d], as `DecoderLayer.forward` of the last layer returns them."""


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a pre-norm and a residual connection.

    A fused kernel adds the output of attention or MLP to the residual stream and applies the next
    norm. So a layer returns its MLP output and the residual stream, without adding them.
    """

    def __init__(self, config: ModelConfig, layer: int, prefix: str | None = None):
        super().__init__()
        prefix = prefix or f"model.layers.{layer}."
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(f"{prefix}input_layernorm", d, eps)
        self.attention: nn.Module
        if config.mla:
            self.attention = MLAttention(config, config.mla, layer, f"{prefix}self_attn.")
        else:
            self.attention = Attention(config, layer, f"{prefix}self_attn.")
        self.mlp_norm = RMSNorm(f"{prefix}post_attention_layernorm", d, eps)
        self.mlp: nn.Module
        if config.moe and config.is_moe_layer(layer):
            names = MIXTRAL_EXPERTS if config.family == "mixtral" else ExpertNames()
            self.mlp = MoE(config, config.moe, prefix, names)
        else:
            self.mlp = MLP(config, f"{prefix}mlp.")

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        kv: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        """x and residual [N, d] -> x and residual [N, d]. The first layer's residual is None."""
        x, residual = self.input_norm.add(x, residual)
        x, residual = self.mlp_norm.add(self.attention(x, rope, batch, kv), residual)
        return self.mlp(x), residual


Block = DecoderLayer | PostNormLayer


class Decoder(nn.Module):
    """A decoder-only transformer over a flat batch.

    Parameters are uninitialised: `models/loader.py` loads a checkpoint, `initialize` sets random
    values.

    Args:
        max_model_len: context length for RoPE schemes that depend on it.
        method_of: selects how each matrix is stored.
        shard: selects this rank's part of the checkpoint (`parallel/shard.py`).
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        max_model_len: int | None = None,
        method_of: MethodOf | None = None,
        shard: Callable[["Decoder"], None] | None = None,
    ):
        super().__init__()
        self.config = config
        max_positions = config.max_position_embeddings
        with torch.device("meta"):
            self.embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
            self.rope = RotaryEmbedding(
                config.rope, config.rotary_dim, max_positions, max_model_len or max_positions
            )
            kind = PostNormLayer if config.post_norm else DecoderLayer
            self.layers = nn.ModuleList(kind(config, n) for n in range(config.num_layers))
            self.norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps)
            self.lm_head: Linear | None = None
            if not config.tie_word_embeddings:
                self.lm_head = Linear("", config.hidden_size, {"lm_head": config.vocab_size})
        self.all_layers: LayersMethod | None = None  # runs all layers in one call
        self.plain_torch = False  # only torch operations, for attention too (`models/packing.py`)
        if shard is not None:
            shard(self)
        for matrix in self.modules():
            if isinstance(matrix, Matrix):
                merge(matrix, config.merged_matrices)
                matrix.method = matrix.method if method_of is None else method_of(matrix)
        allocate(self, dtype, device)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of activations and KV cache; matrices may be stored in another."""
        return self.norm.weight.dtype

    @property
    def num_bytes(self) -> int:
        """Memory of all weights, also for a model on the meta device."""
        norms = sum(norm.weight.nbytes for norm in self.modules() if isinstance(norm, RMSNorm))
        return norms + sum(part.num_bytes for part in self.modules() if isinstance(part, Matrix))

    def forward(self, batch: Batch, kv: AttentionBackend) -> Tensor:
        """N tokens -> hidden states [N, d]. Writes the tokens' KV to the cache."""
        rope = self.rope(batch.positions, self.plain_torch)
        x, residual = self.embedding(batch.input_ids), None
        if self.all_layers is not None and self.all_layers.takes(kv, x):
            x, residual = self.all_layers(x, rope, batch, kv)
        else:
            for layer in self.layers:
                x, residual = layer(x, residual, rope, batch, kv)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[K, d] -> [K, V], in the model's dtype."""
        return self.embedding.as_output(hidden) if self.lm_head is None else self.lm_head(hidden)

    def checkpoint_tensors(self) -> dict[str, CheckpointTensor]:
        """As `tensors_of`."""
        return tensors_of(self)

    @torch.no_grad()
    def initialize(self, std: float = 0.02, seed: int = 0) -> None:
        """Random weights: matrices normal with `std`, norms 1, biases 0."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, std, generator=generator)
        for module in self.modules():
            if isinstance(module, Router) and module.bias is not None:
                module.bias.zero_()


def allocate(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Allocate a module that was built on the meta device: matrices by their methods, other
    parameters in `dtype`, buffers in their own dtype.

    Torch's default dtype is not changed, so two threads can load models at the same time.
    """
    for part in module.modules():
        if isinstance(part, Matrix):
            part.create(dtype, device)
        for name, parameter in part.named_parameters(recurse=False):
            if not isinstance(part, Matrix):
                memory = torch.empty(parameter.shape, dtype=dtype, device=device)
                setattr(part, name, frozen(memory))
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
            else:
                setattr(part, name, buffer.to(device))


def tensors_of(module: nn.Module) -> dict[str, CheckpointTensor]:
    """All tensors of a checkpoint of which a module's matrices and norms hold a part, by name.
    RuntimeError if two of its layers read the same one."""
    tensors: dict[str, CheckpointTensor] = {}
    for layer in module.modules():
        for tensor in layer.checkpoint_tensors() if isinstance(layer, Matrix | RMSNorm) else ():
            if tensor.name in tensors:
                raise RuntimeError(
                    f"Two layers of the model read {tensor.name}; each tensor has one place."
                )
            tensors[tensor.name] = tensor
    return tensors
