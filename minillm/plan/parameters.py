"""The matrix products of a model, layer by layer, and its parameter counts.

Parameters, operations and bytes (`cost.py`) are all computed from the same list of products.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from minillm.config import ModelConfig
from minillm.errors import ConfigError

Part = Literal["attention", "mlp", "router", "experts", "shared_experts"]


@dataclass(frozen=True)
class Product:
    """A matrix product of one layer, from `inputs` to `outputs` values per row.

    `copies` matrices of this shape are stored, and each token uses `used` of them: the experts of
    an MoE layer, or the per-head matrices of absorbed MLA (where it uses all).
    """

    part: Part
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    used: int = 1

    @property
    def parameters(self) -> int:
        """Stored values, bias included."""
        return self.copies * (self.inputs * self.outputs + self.bias * self.outputs)

    def parameters_read(self, num_tokens: int) -> float:
        """Expected number of stored values that a step of `num_tokens` tokens reads."""
        return self.parameters / self.copies * expected_distinct(self.copies, self.used, num_tokens)


def layer_products(config: ModelConfig, layer: int) -> tuple[Product, ...]:
    """Every matrix product of layer `layer`, in the order of the forward pass."""
    attention = _mla_products(config) if config.mla else _gqa_products(config)
    return (*attention, *_mlp_products(config, layer))


def _gqa_products(config: ModelConfig) -> tuple[Product, ...]:
    query = config.num_heads * config.head_dim
    qkv = query + 2 * config.num_kv_heads * config.head_dim
    return (
        Product("attention", config.hidden_size, qkv, config.qkv_bias),
        Product("attention", query, config.hidden_size, config.output_bias),
    )


def _mla_products(config: ModelConfig) -> tuple[Product, ...]:
    """DeepSeek-V2 (2024), equations 9 to 19, with the up-projections of keys and values absorbed
    into the query and the output: per head nope -> latent before attention, latent -> v after it.
    """
    mla, hidden, heads = config.mla, config.hidden_size, config.num_heads
    if mla is None:
        raise ConfigError(f"The {config.family} configuration has no latent attention.")
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    rank = mla.q_lora_rank
    down = () if rank is None else (Product("attention", hidden, rank, config.qkv_bias),)
    return (
        *down,
        Product("attention", hidden if rank is None else rank, query),
        Product("attention", hidden, mla.kv_lora_rank + mla.qk_rope_head_dim, config.qkv_bias),
        Product("attention", mla.qk_nope_head_dim, mla.kv_lora_rank, copies=heads, used=heads),
        Product("attention", mla.kv_lora_rank, mla.v_head_dim, copies=heads, used=heads),
        Product("attention", heads * mla.v_head_dim, hidden, config.output_bias),
    )


def _mlp_products(config: ModelConfig, layer: int) -> tuple[Product, ...]:
    hidden, moe = config.hidden_size, config.moe
    if moe is None or not config.is_moe_layer(layer):
        return (
            Product("mlp", hidden, 2 * config.intermediate_size, config.mlp_bias),
            Product("mlp", config.intermediate_size, hidden, config.mlp_bias),
        )
    size, copies, used = moe.intermediate_size, moe.num_experts, moe.num_experts_per_token
    shared = moe.shared_intermediate_size
    return (
        Product("router", hidden, moe.num_experts, moe.score_bias),
        Product("experts", hidden, 2 * size, copies=copies, used=used),
        Product("experts", size, hidden, copies=copies, used=used),
        *((Product("shared_experts", hidden, 2 * shared, config.mlp_bias),) if shared else ()),
        *((Product("shared_experts", shared, hidden, config.mlp_bias),) if shared else ()),
    )


@lru_cache(maxsize=128)  # a simulation asks for each of its steps
def all_products(config: ModelConfig) -> Counter[Product]:
    """The products of all layers, each with the number of times that it occurs."""
    return Counter(p for layer in range(config.num_layers) for p in layer_products(config, layer))


def expected_distinct(num_experts: int, per_token: int, num_tokens: int) -> float:
    """Expected number of experts that at least one of `num_tokens` tokens chooses.

    Exact if tokens choose independently and uniformly, with or without groups. Real tokens are
    correlated and choose fewer distinct experts.
    """
    return num_experts * (1 - (1 - per_token / num_experts) ** num_tokens)


@dataclass(frozen=True)
class ParameterCount:
    """Stored values of a model by part; `lm_head` is 0 when it is the embedding (tied).

    `active` is the number of values that one token uses, with the whole embedding table and output
    head, as in "37B active of 671B".
    """

    embedding: int
    attention: int
    mlp: int
    router: int
    experts: int
    shared_experts: int
    norms: int
    lm_head: int
    active: int

    @property
    def total(self) -> int:
        """All stored values: the sum over the tensors of the checkpoint."""
        blocks = self.attention + self.mlp + self.router + self.experts + self.shared_experts
        return self.embedding + blocks + self.norms + self.lm_head


def parameter_count(config: ModelConfig) -> ParameterCount:
    """Exact parameter counts, including DeepSeek-V3's router biases."""
    parts: Counter[str] = Counter()
    idle = 0
    for product, times in all_products(config).items():
        parts[product.part] += times * product.parameters
        idle += times * product.parameters // product.copies * (product.copies - product.used)
    table = config.vocab_size * config.hidden_size
    head = 0 if config.tie_word_embeddings else table
    norms = norm_parameters(config)
    return ParameterCount(
        embedding=table,
        attention=parts["attention"],
        mlp=parts["mlp"],
        router=parts["router"],
        experts=parts["experts"],
        shared_experts=parts["shared_experts"],
        norms=norms,
        lm_head=head,
        active=table + parts.total() + norms + head - idle,
    )


def norm_parameters(config: ModelConfig) -> int:
    """Weights of all RMSNorms: two per layer, those of heads or latents, and the final one."""
    per_layer = 2 * config.hidden_size
    if config.qk_norm:
        per_layer += 2 * config.head_dim
    if config.post_norm:
        per_layer += (config.num_heads + config.num_kv_heads) * config.head_dim
    if config.mla:
        per_layer += config.mla.kv_lora_rank + (config.mla.q_lora_rank or 0)
    return config.num_layers * per_layer + config.hidden_size
