"""Parses a Hugging Face ``config.json`` into a `ModelConfig`, with one function per model family.

Missing fields have the defaults of transformers. An unsupported value raises an error that names
the field; no field that affects the output is ignored.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from minillm.api.sampling_params import shown
from minillm.config import DTYPE_BYTES, MLAConfig, ModelConfig, MoEConfig, RopeConfig
from minillm.errors import ConfigError, UnsupportedFeatureError, did_you_mean

Fields = Mapping[str, Any]
LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor")
ROPE_NUMBERS = (
    *("low_freq_factor", "high_freq_factor"),  # llama3
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),  # yarn
)
LAYER_TYPES = ("sliding_attention", "full_attention")
LARGEST = 1 << 24  # limit of integer fields; larger positions are not exact in float32
MAX_LAYERS, MAX_EXPERTS = 1024, 4096  # modules are created before the weights are checked
LIMITS: Mapping[str, int] = {
    "num_hidden_layers": MAX_LAYERS,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), MAX_EXPERTS),
}


def parse_config(data: Fields) -> ModelConfig:
    """Describe the model of a parsed ``config.json``.

    Raises ConfigError (unknown family, missing or ill-typed field) and UnsupportedFeatureError.
    """
    family = str(data.get("model_type"))
    if family not in FAMILIES:
        hint = did_you_mean(family, FAMILIES)
        raise ConfigError(
            f"config.json says model_type {family!r}; minillm knows {', '.join(FAMILIES)}.{hint}"
        )
    only(data, "hidden_act", "silu")
    return FAMILIES[family](data)


def only(data: Fields, name: str, supported: Any) -> None:
    """Raise an error if a field is present with another value than the supported one."""
    if data.get(name, supported) != supported:
        raise UnsupportedFeatureError(
            f"config.json says {name} = {data[name]!r}; this version has only {supported!r}."
        )


def integer(data: Fields, name: str, default: int | None = None) -> int:
    """An integer field. null means the default; without a default the field is required."""
    value = data.get(name)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config.json has no {name!r}, which this model family needs.")
    most = LIMITS.get(name, LARGEST)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > most:
        raise ConfigError(
            f"config.json says {name} = {shown(value)}; it must be a whole number up to {most}."
        )
    return value


def flag(data: Fields, name: str, default: bool = False) -> bool:
    """A boolean field; null means the default."""
    value = data.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ConfigError(f"config.json says {name} = {value!r}; it must be true or false.")
    return value


def section(data: Fields, name: str) -> Fields:
    """An object field; missing or null means empty."""
    value = data.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json says {name} = {value!r}; it must be a JSON object.")
    return value


def numbers(data: Fields, name: str) -> tuple[Any, ...]:
    """A field with a list of numbers; missing or null means empty."""
    value = data.get(name)
    value = [] if value is None else value
    if not isinstance(value, list | tuple) or not all(map(is_number, value)):
        raise ConfigError(f"config.json says {name} = {value!r}; it must be a list of numbers.")
    return tuple(value)


def number(data: Fields, name: str, default: float) -> float:
    """A number field; null means the default."""
    value = data.get(name)
    value = default if value is None else value
    if not is_number(value):
        raise ConfigError(f"config.json says {name} = {shown(value)}; it must be a finite number.")
    return float(value)


def is_number(value: object) -> bool:
    """Whether a value is a finite number that fits in a float. Python's JSON parser accepts NaN,
    Infinity and integers of any size."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    )


def dtype_name(data: Fields) -> str:
    """The checkpoint's dtype, from ``dtype`` or ``torch_dtype``; float32 if both are missing."""
    name = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnsupportedFeatureError(
            f"config.json says dtype {name!r}; this version has {', '.join(DTYPE_BYTES)}."
        )
    return name


def rope_config(data: Fields, theta: float = 10000.0, interleaved: bool = False) -> RopeConfig:
    """RoPE from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    fields: dict[str, Any] = {
        "rope_theta": data.get("rope_theta"),
        "original_max_position_embeddings": data.get("original_max_position_embeddings"),
        **section(data, "rope_scaling"),
        **section(data, "rope_parameters"),
    }
    if any(isinstance(value, Mapping) for value in fields.values()):
        raise UnsupportedFeatureError("RoPE differs between layer types; this version has one.")
    rope_type: Any = fields.get("rope_type") or fields.get("type") or "default"
    rope_type = "longrope" if rope_type == "su" else rope_type  # the old name, in Phi-3
    if number(fields, "partial_rotary_factor", number(data, "partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedFeatureError("partial_rotary_factor is not 1; this version rotates all.")
    length = integer(data, "max_position_embeddings")
    given = fields["original_max_position_embeddings"] is not None
    original = integer(fields, "original_max_position_embeddings") if given else None
    # yarn and longrope: the default factor is the ratio of the two lengths.
    ratio = length / original if rope_type in ("yarn", "longrope") and original else 1.0
    needed = {"linear": ("factor",), "dynamic": ("factor",), "llama3": LLAMA3_FIELDS}
    for name in needed.get(str(rope_type), ()):
        if fields.get(name) is None:
            raise ConfigError(f"config.json gives no {name!r}, which {rope_type} RoPE needs.")
    return RopeConfig(
        theta=number(fields, "rope_theta", theta),
        rope_type=rope_type,
        factor=number(fields, "factor", ratio),
        original_max_position_embeddings=original,
        truncate=flag(fields, "truncate", True),
        short_factor=numbers(fields, "short_factor"),
        long_factor=numbers(fields, "long_factor"),
        interleaved=interleaved,
        **{name: number(fields, name, 0) for name in ROPE_NUMBERS if fields.get(name) is not None},
    )


def common(data: Fields, family: str, kv_heads: int | None = None, **overrides: Any) -> ModelConfig:
    """Fields shared by all families; `overrides` are specific to a family.

    `kv_heads` is the default of a missing ``num_key_value_heads``. If it is None, or the field is
    null, there is one KV head per query head.
    """
    heads = integer(data, "num_attention_heads")
    absent = "num_key_value_heads" not in data
    hidden_size = integer(data, "hidden_size")
    values: dict[str, Any] = {
        "vocab_size": integer(data, "vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": integer(data, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": integer(
            data, "num_key_value_heads", (kv_heads or heads) if absent else heads
        ),
        "head_dim": integer(data, "head_dim", hidden_size // max(heads, 1)),
        "intermediate_size": integer(data, "intermediate_size"),
        "max_position_embeddings": integer(data, "max_position_embeddings"),
        "rms_norm_eps": number(data, "rms_norm_eps", 1e-6),
        "tie_word_embeddings": flag(data, "tie_word_embeddings"),
        "dtype": dtype_name(data),
    }
    if "rope" not in overrides:
        values["rope"] = rope_config(data)
    return ModelConfig(family=family, **(values | overrides))


def window_of(data: Fields, default: int | None) -> int | None:
    """The sliding window; missing means the family's default, null means none."""
    if data.get("sliding_window", default) is None:
        return None
    window = integer(data, "sliding_window", default)
    if window < 1:
        raise ConfigError(f"config.json says sliding_window = {window}; it must be at least 1.")
    return window


def every_layer(data: Fields, window: int | None) -> tuple[int | None, ...]:
    """The same sliding window in all layers."""
    return (window,) * integer(data, "num_hidden_layers") if window else ()


def upper_layers(data: Fields) -> tuple[int | None, ...]:
    """Qwen's sliding windows: in the layers given by `layer_types`, or else from layer
    `max_window_layers` on."""
    if not flag(data, "use_sliding_window"):
        return ()
    window, layers = window_of(data, 4096), integer(data, "num_hidden_layers")
    kinds = data.get("layer_types")
    if kinds is None:
        first = integer(data, "max_window_layers", 28)
        kinds = [LAYER_TYPES[0] if i >= first else LAYER_TYPES[1] for i in range(layers)]
    if not isinstance(kinds, list) or not all(kind in LAYER_TYPES for kind in kinds):
        raise UnsupportedFeatureError(
            f"config.json says layer_types = {kinds!r}; this version has lists of "
            f"{' and '.join(LAYER_TYPES)}."
        )
    return tuple(window if kind == LAYER_TYPES[0] else None for kind in kinds)


def llama(data: Fields) -> ModelConfig:
    """Llama 1 to 3, and SmolLM2, which has the same architecture."""
    bias = flag(data, "attention_bias")
    mlp_bias = flag(data, "mlp_bias")
    return common(data, "llama", qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def mistral(data: Fields) -> ModelConfig:
    """Mistral: Llama with a sliding window, by default 4,096."""
    window = every_layer(data, window_of(data, 4096))
    return common(data, "mistral", kv_heads=8, sliding_windows=window)


def qwen2(data: Fields) -> ModelConfig:
    """Qwen2 and 2.5: biases on q, k and v, but not on o."""
    return common(data, "qwen2", kv_heads=32, qkv_bias=True, sliding_windows=upper_layers(data))


def qwen3(data: Fields) -> ModelConfig:
    """Qwen3: a norm on every query and key head."""
    bias = flag(data, "attention_bias")
    return common(
        data,
        "qwen3",
        kv_heads=32,
        head_dim=integer(data, "head_dim", 128),
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        sliding_windows=upper_layers(data),
    )


def mixtral(data: Fields) -> ModelConfig:
    """Mixtral: softmax over all experts; weights of the top k are normalised."""
    return common(
        data,
        "mixtral",
        kv_heads=8,
        rope=rope_config(data, theta=1e6),
        rms_norm_eps=number(data, "rms_norm_eps", 1e-5),
        sliding_windows=every_layer(data, window_of(data, None)),
        moe=MoEConfig(
            num_experts=integer(data, "num_local_experts", data.get("num_experts")),
            num_experts_per_token=integer(data, "num_experts_per_tok", 2),
            intermediate_size=integer(data, "intermediate_size"),
        ),
    )


def qwen3_moe(data: Fields) -> ModelConfig:
    """Qwen3-MoE: Qwen3 with experts instead of the MLP, except in `mlp_only_layers`."""
    bias = flag(data, "attention_bias")
    layers, step = integer(data, "num_hidden_layers"), integer(data, "decoder_sparse_step", 1)
    dense = numbers(data, "mlp_only_layers")
    if step < 1:
        raise ConfigError(f"config.json says decoder_sparse_step = {step}; it must be at least 1.")
    window = window_of(data, 4096) if flag(data, "use_sliding_window") else None
    return common(
        data,
        "qwen3_moe",
        kv_heads=4,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        sliding_windows=every_layer(data, window),
        moe=MoEConfig(
            num_experts=integer(data, "num_experts", data.get("num_local_experts")),
            num_experts_per_token=integer(data, "num_experts_per_tok", 8),
            intermediate_size=integer(data, "moe_intermediate_size"),
            normalize=flag(data, "norm_topk_prob"),
        ),
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def deepseek(data: Fields, family: str, moe: MoEConfig, dense_layers: int) -> ModelConfig:
    """Fields shared by DeepSeek-V2 and V3: MLA, and experts after the first dense layers."""
    only(data, "moe_layer_freq", 1)
    low_rank = data.get("q_lora_rank", 1536) is not None
    mla = MLAConfig(
        kv_lora_rank=integer(data, "kv_lora_rank", 512),
        qk_nope_head_dim=integer(data, "qk_nope_head_dim", 128),
        qk_rope_head_dim=integer(data, "qk_rope_head_dim", 64),
        v_head_dim=integer(data, "v_head_dim", 128),
        q_lora_rank=integer(data, "q_lora_rank", 1536) if low_rank else None,
    )
    bias = flag(data, "attention_bias")
    return common(
        data,
        family,
        rope=rope_config(data, interleaved=flag(data, "rope_interleave", True)),
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(data, "mlp_bias"),
        mla=mla,
        moe=moe,
        moe_layers=tuple(i >= dense_layers for i in range(integer(data, "num_hidden_layers"))),
    )


def shared_experts(data: Fields, default: int) -> int:
    """Number of shared experts; null means none, a missing field the default."""
    if data.get("n_shared_experts", default) is None:
        return 0
    return integer(data, "n_shared_experts", default)


def deepseek_v2(data: Fields) -> ModelConfig:
    """DeepSeek-V2: softmax routing, in the larger models limited to the top groups."""
    only(data, "scoring_func", "softmax")
    method = data.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy") or flag(data, "norm_topk_prob"):
        raise UnsupportedFeatureError(
            f"topk_method is {method!r} and norm_topk_prob is {data.get('norm_topk_prob')}; "
            "for DeepSeek-V2 this version has greedy and group_limited_greedy, not normalised."
        )
    grouped = method == "group_limited_greedy"
    size = integer(data, "moe_intermediate_size", 1407)
    moe = MoEConfig(
        num_experts=integer(data, "n_routed_experts", 64),
        num_experts_per_token=integer(data, "num_experts_per_tok"),
        intermediate_size=size,
        shared_intermediate_size=size * shared_experts(data, 2),
        normalize=False,
        routed_scaling_factor=number(data, "routed_scaling_factor", 1.0),
        num_groups=integer(data, "n_group") if grouped else 1,
        topk_groups=integer(data, "topk_group") if grouped else 1,
    )
    return deepseek(data, "deepseek_v2", moe, integer(data, "first_k_dense_replace", 0))


def deepseek_v3(data: Fields) -> ModelConfig:
    """DeepSeek-V3 and R1: sigmoid routing with a score bias, limited to the top groups."""
    only(data, "scoring_func", "sigmoid")
    only(data, "topk_method", "noaux_tc")
    size = integer(data, "moe_intermediate_size", 2048)
    moe = MoEConfig(
        num_experts=integer(data, "n_routed_experts", 256),
        num_experts_per_token=integer(data, "num_experts_per_tok", 8),
        intermediate_size=size,
        shared_intermediate_size=size * shared_experts(data, 1),
        scoring="sigmoid",
        normalize=flag(data, "norm_topk_prob", True),
        routed_scaling_factor=number(data, "routed_scaling_factor", 2.5),
        num_groups=integer(data, "n_group", 8),
        topk_groups=integer(data, "topk_group", 4),
        group_score="top2",
        score_bias=True,
    )
    return deepseek(data, "deepseek_v3", moe, integer(data, "first_k_dense_replace", 3))


FAMILIES: Mapping[str, Callable[[Fields], ModelConfig]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
}
