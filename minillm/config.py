"""The architecture of a model as one frozen dataclass, `ModelConfig`.

`models/families/` creates it from a Hugging Face ``config.json`` of each model family (Llama,
Qwen3, DeepSeek-V3, ...), and `models/presets.py` from the embedded ``config.json`` of a well-known
model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Literal

from minillm.errors import ConfigError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE_TYPES: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

MODEL_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and its context-extension variants.

    `interleaved` rotates pairs of dimensions (2i, 2i+1), as DeepSeek does, else (i, i + dim/2).
    A `rope_type` ignores the fields that it does not use.
    """

    theta: float = 10000.0
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn, DeepSeek's attention temperature
    mscale_all_dim: float | None = None  # yarn, DeepSeek's attention temperature
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn, longrope
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ConfigError(
                f"rope_type is {self.rope_type!r}; supported are {', '.join(ROPE_TYPES)}."
            )
        limits = {"theta": 1, "original_max_position_embeddings": 1}
        for name in (*limits, "factor", "beta_fast", "beta_slow"):
            value, low = getattr(self, name), limits.get(name, 0)
            if value is not None and not low < value < inf:
                raise ConfigError(f"rope {name} is {value}; it must be greater than {low}.")


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1). Per token the KV cache holds
    one latent of `kv_lora_rank` values and one rotated key part of `qk_rope_head_dim` values."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")


@dataclass(frozen=True)
class MoEConfig:
    """A mixture-of-experts MLP: its experts, and how the router chooses among them.

    `scoring`: softmax over all experts, or an independent sigmoid per expert (DeepSeek-V3).
    `num_groups` > 1 limits the choice to the best `topk_groups` groups of experts; a group's
    score is that of its best expert ("max", V2) or the sum of its two best ("top2", V3).
    `score_bias`: the checkpoint has a bias that is added to the scores when experts are chosen,
    but not to their weights.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0  # of the shared experts as one dense MLP; 0: none
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True  # the chosen weights sum to one
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    score_bias: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.num_experts_per_token <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_token is {self.num_experts_per_token}; "
                f"it must be between 1 and num_experts ({self.num_experts})."
            )
        if (
            self.num_groups < 1
            or self.num_experts % self.num_groups
            or not 0 < self.topk_groups <= self.num_groups
        ):
            raise ConfigError(
                f"{self.num_experts} experts cannot form {self.num_groups} equal groups "
                f"of which {self.topk_groups} are chosen."
            )
        if self.num_experts_per_token > self.num_experts // self.num_groups * self.topk_groups:
            raise ConfigError(
                f"A token needs {self.num_experts_per_token} experts, but its {self.topk_groups} "
                f"groups have only {self.num_experts // self.num_groups} each."
            )
        if self.intermediate_size < 1 or self.shared_intermediate_size < 0:
            raise ConfigError(
                f"moe_intermediate_size is {self.intermediate_size} and that of all shared experts "
                f"is {self.shared_intermediate_size}; they must be at least 1 and at least 0."
            )


PER_LAYER = ("rope_layers", "sliding_windows", "moe_layers")  # fields with an entry per layer


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder-only model. Sizes are numbers of values, not bytes."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the dense MLP
    max_position_embeddings: int
    rope: RopeConfig = RopeConfig()
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # bias of the attention output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each query and key head (Qwen3)
    post_norm: bool = False  # norms behind attention and MLP, and over all of q and k (OLMo-2)
    rope_layers: tuple[bool, ...] = ()  # per layer; empty: RoPE in all (SmolLM3 has some without)
    sliding_windows: tuple[int | None, ...] = ()  # per layer; empty: full attention everywhere
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    moe_layers: tuple[bool, ...] = ()  # per layer; empty: all layers if `moe` is set
    # Matrices that the checkpoint stores as one, in the order of their rows, such as
    # ("qkv_proj", ("q_proj", "k_proj", "v_proj")). They must belong to one `Linear`.
    merged_matrices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    dtype: str = "bfloat16"  # of the checkpoint

    def __post_init__(self) -> None:
        for name in MODEL_SIZES:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not 0 < self.rms_norm_eps < inf:
            raise ConfigError(f"rms_norm_eps is {self.rms_norm_eps}; it must be greater than 0.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})."
            )
        factors = (self.rope.short_factor, self.rope.long_factor)
        if self.rotary_dim % 2 or (
            self.rope.rope_type == "longrope"
            and any(2 * len(factor) != self.rotary_dim for factor in factors)
        ):
            raise ConfigError(
                f"RoPE rotates {self.rotary_dim} dimensions; the number must be even, and longrope "
                f"needs half as many factors ({', '.join(str(len(f)) for f in factors)} are given)."
            )
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype is {self.dtype!r}; supported are {', '.join(DTYPE_BYTES)}.")
        for name in PER_LAYER:
            if getattr(self, name) and len(getattr(self, name)) != self.num_layers:
                raise ConfigError(
                    f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers."
                )

    def sliding_window(self, layer: int) -> int | None:
        """Number of latest positions that `layer` attends to, its own included; None for all."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def has_rope(self, layer: int) -> bool:
        """Whether `layer` rotates queries and keys."""
        return not self.rope_layers or self.rope_layers[layer]

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the MLP of `layer` is a mixture of experts."""
        return self.moe is not None and (not self.moe_layers or self.moe_layers[layer])

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that RoPE rotates."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def longest_context(self) -> int:
        """The maximum context length, extended by RoPE scaling as in vLLM: for llama3 and longrope
        `max_position_embeddings` is the extended length."""
        rope, length = self.rope, self.max_position_embeddings
        if rope.rope_type in ("default", "llama3", "longrope"):
            return length
        trained = rope.rope_type == "yarn" and rope.original_max_position_embeddings
        return max(length, int((trained or length) * rope.factor))


# What C functions of whole layers, sums of fixed order and shards of ranks compute. A model in
# which another field is not its default does without them: a new field is right first, and fast
# once it is listed here.
KNOWN_FIELDS: Mapping[type, str] = {
    ModelConfig: """family vocab_size hidden_size num_layers num_heads num_kv_heads head_dim
        intermediate_size max_position_embeddings rope rms_norm_eps tie_word_embeddings qkv_bias
        output_bias mlp_bias qk_norm sliding_windows mla moe moe_layers
        merged_matrices dtype""",
    RopeConfig: """theta rope_type factor original_max_position_embeddings low_freq_factor
        high_freq_factor beta_fast beta_slow mscale mscale_all_dim truncate attention_factor
        short_factor long_factor interleaved""",
    MLAConfig: "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim q_lora_rank",
    MoEConfig: """num_experts num_experts_per_token intermediate_size shared_intermediate_size
        scoring normalize routed_scaling_factor num_groups topk_groups group_score
        score_bias""",
}


def unknown_fields(config: ModelConfig) -> list[str]:
    """The fields outside `KNOWN_FIELDS` that a model uses."""
    found: list[str] = []
    for part in (config, config.rope, config.mla, config.moe):
        for kind, known in KNOWN_FIELDS.items():
            if part is not None and isinstance(part, kind):
                others = (one for one in fields(part) if one.name not in known.split())
                found += [one.name for one in others if getattr(part, one.name) != one.default]
    return found
