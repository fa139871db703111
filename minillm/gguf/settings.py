"""The metadata of a GGUF file as the fields of a Hugging Face config.json.

`models/families/` checks and completes them as it does for a config.json. What the metadata does
not say (biases, tied output, which layers have experts) follows from the tensors.
"""

from collections.abc import Callable, Mapping
from typing import Any

from minillm.errors import CheckpointError, UnsupportedFeatureError, did_you_mean
from minillm.gguf.container import GGUFFile

SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
YARN_MSCALE = 0.1  # yarn_log_multiplier is this much of `mscale_all_dim`
UNITS: Mapping[str, float] = {
    "attention.scale": 0.0,
    "attention.clamp_kqv": 0.0,
    "rope.scaling.attn_factor": 1.0,
}


class Settings:
    """The metadata of one file, by the part of the key after the architecture."""

    def __init__(self, file: GGUFFile):
        self.file, self.fields = file, file.fields
        self.architecture = str(file.fields.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        """A field of the architecture, such as "block_count"."""
        return self.fields.get(f"{self.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        """A field that must be there. An array with one value per layer must have equal values."""
        value = self.get(name)
        if value is None:
            raise CheckpointError(
                f"{self.file.path} has no {self.architecture}.{name}, which the architecture "
                f"{self.architecture} needs."
            )
        return self.same(name, value)

    def same(self, name: str, value: Any) -> Any:
        """The value of all layers."""
        if isinstance(value, tuple):
            if len(set(value)) != 1:
                raise UnsupportedFeatureError(
                    f"{self.file.path} gives layers different values of {name}; this version has "
                    "one value for all layers."
                )
            return value[0]
        return value

    def has(self, suffix: str) -> bool:
        """Whether any layer has a tensor, such as "attn_q.bias"."""
        return any(
            name.startswith("blk.") and name.split(".", 2)[-1] == suffix
            for name in self.file.tensors
        )


def config_fields(file: GGUFFile) -> dict[str, Any]:
    """The fields of a config.json that describe the file's model.

    Raises:
        CheckpointError: a field is missing.
        UnsupportedFeatureError: the architecture or a feature is not supported.
    """
    if file.fields.get("split.count", 1) not in (0, 1):
        raise UnsupportedFeatureError(
            f"{file.path} is one of {file.fields['split.count']} parts of a model; join them with "
            "llama.cpp's `llama-gguf-split --merge` first."
        )
    settings = Settings(file)
    architecture = ARCHITECTURES.get(settings.architecture)
    if architecture is None:
        raise UnsupportedFeatureError(
            f"{file.path} has the architecture {settings.architecture!r}; this version reads "
            f"{', '.join(ARCHITECTURES)}."
            f"{did_you_mean(settings.architecture, ARCHITECTURES)}"
        )
    for name, unused in UNITS.items():
        if settings.get(name, unused) != unused:
            raise UnsupportedFeatureError(
                f"{file.path} sets {settings.architecture}.{name}, which this version does not "
                "support."
            )
    return architecture(settings)


def shared(settings: Settings) -> dict[str, Any]:
    """The fields of all families."""
    heads, width = settings.need("attention.head_count"), settings.need("embedding_length")
    kv_heads = settings.get("attention.head_count_kv")
    last = settings.get("nextn_predict_layers", 0)
    return {
        "vocab_size": settings.get("vocab_size", vocabulary(settings)),
        "hidden_size": width,
        "num_hidden_layers": settings.need("block_count") - last,
        "num_nextn_predict_layers": last,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if kv_heads is None else settings.same("heads", kv_heads),
        "intermediate_size": settings.need("feed_forward_length"),
        "max_position_embeddings": settings.need("context_length"),
        "rms_norm_eps": settings.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in settings.file.tensors,
        "dtype": stored_dtype(settings.file),
        "rope_theta": settings.get("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(settings),
    }


def with_heads(settings: Settings) -> dict[str, Any]:
    """The fields of families without latent attention."""
    fields = shared(settings)
    head_dim = fields["hidden_size"] // max(fields["num_attention_heads"], 1)
    fields["head_dim"] = settings.get(
        "attention.key_length", settings.get("rope.dimension_count", head_dim)
    )
    rotated = settings.get("rope.dimension_count", fields["head_dim"])
    values = settings.get("attention.value_length", fields["head_dim"])
    if not rotated == values == fields["head_dim"]:
        raise UnsupportedFeatureError(
            f"{settings.file.path} has keys of {fields['head_dim']}, values of {values} and "
            f"{rotated} rotated dimensions per head; this version needs equal numbers."
        )
    fields["attention_bias"] = settings.has("attn_q.bias")
    return fields


def llama(settings: Settings) -> dict[str, Any]:
    """Llama, Mistral (with a sliding window) and Mixtral (with experts)."""
    fields = with_heads(settings) | {"mlp_bias": settings.has("ffn_up.bias")}
    window = settings.get("attention.sliding_window")
    if settings.get("expert_count", 0):
        return fields | {
            "model_type": "mixtral",
            "sliding_window": window or None,
            "num_local_experts": settings.need("expert_count"),
            "num_experts_per_tok": settings.need("expert_used_count"),
        }
    if window:
        return fields | {"model_type": "mistral", "sliding_window": window}
    return fields | {"model_type": "llama"}


def qwen(settings: Settings) -> dict[str, Any]:
    """Qwen2 and Qwen3."""
    return with_heads(settings) | {"model_type": settings.architecture}


def qwen3moe(settings: Settings) -> dict[str, Any]:
    """Qwen3 with experts; llama.cpp always normalises the weights of the chosen experts."""
    return with_heads(settings) | {
        "model_type": "qwen3_moe",
        "num_experts": settings.need("expert_count"),
        "num_experts_per_tok": settings.need("expert_used_count"),
        "moe_intermediate_size": settings.need("expert_feed_forward_length"),
        "norm_topk_prob": settings.get("expert_weights_norm", True),
    }


def deepseek2(settings: Settings) -> dict[str, Any]:
    """DeepSeek-V2 and V3. V3's router has sigmoid scores and a bias."""
    rotated, rank = settings.need("rope.dimension_count"), settings.need("attention.kv_lora_rank")
    # The MQA form: keys of rank + rotated values; the lengths of the MHA form have own fields.
    head_dim = settings.get("attention.key_length_mla", settings.get("attention.key_length", 0))
    value_dim = settings.get("attention.value_length_mla", settings.get("attention.value_length"))
    gate = settings.get("expert_gating_func", SIGMOID if settings.has(SCORE_BIAS) else SOFTMAX)
    if gate not in (SOFTMAX, SIGMOID):
        raise UnsupportedFeatureError(
            f"{settings.file.path} has expert_gating_func {gate}; this version has 1 and 2."
        )
    groups = settings.get("expert_group_count", 0) or 1
    fields = shared(settings) | {
        "kv_lora_rank": rank,
        "q_lora_rank": settings.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head_dim - rotated,
        "v_head_dim": value_dim,
        "attention_bias": settings.has("attn_kv_a_mqa.bias"),
        "mlp_bias": settings.has("ffn_up.bias"),
        "n_routed_experts": settings.need("expert_count"),
        "num_experts_per_tok": settings.need("expert_used_count"),
        "n_shared_experts": settings.get("expert_shared_count", 0),
        "moe_intermediate_size": settings.need("expert_feed_forward_length"),
        "routed_scaling_factor": settings.get("expert_weights_scale", 0.0) or 1.0,
        "first_k_dense_replace": settings.get("leading_dense_block_count", 0),
        "norm_topk_prob": settings.get("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": settings.get("expert_group_used_count", 0) or 1,
    }
    # All heads share one latent, so the file says that there is one KV head.
    fields["num_key_value_heads"] = fields["num_attention_heads"]
    if gate == SIGMOID:
        return fields | {"model_type": "deepseek_v3"}
    method = "group_limited_greedy" if groups > 1 else "greedy"
    return fields | {"model_type": "deepseek_v2", "topk_method": method}


SCORE_BIAS = "exp_probs_b.bias"
ARCHITECTURES: Mapping[str, Callable[[Settings], dict[str, Any]]] = {
    "llama": llama,
    "qwen2": qwen,
    "qwen3": qwen,
    "qwen3moe": qwen3moe,
    "deepseek2": deepseek2,
}


def vocabulary(settings: Settings) -> int:
    """Rows of the embedding."""
    embedding = settings.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{settings.file.path} has no tensor token_embd.weight.")
    return embedding.shape[0]


def stored_dtype(file: GGUFFile) -> str:
    """The dtype to compute in: that of the plain matrices, bfloat16 if any are quantised."""
    types = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    known = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    best = types - {"F32"} or {"F32"}
    return known.get(best.pop(), "bfloat16") if len(best) == 1 else "bfloat16"


def rope_scaling(settings: Settings) -> dict[str, Any]:
    """RoPE scaling; without a type it is linear, without a factor there is none. The factors of
    `rope_freqs.weight` (llama3) become those of "longrope", which divides each frequency by a
    factor from the file; a linear factor is the same for all frequencies."""
    file, kind = settings.file, settings.get("rope.scaling.type", "linear")
    old = settings.get("rope.scale_linear")  # before the type had a field
    factor = settings.get("rope.scaling.factor", old) or 1.0
    own = "rope_freqs.weight" in file.tensors
    unread = any(name.startswith("rope_factors") for name in file.tensors)
    if kind not in ("none", "linear", "yarn") or unread or (own and kind == "yarn"):
        raise UnsupportedFeatureError(
            f"{file.path} has RoPE scaling {kind!r}{' and rope_freqs.weight' * own}; this version "
            "reads none, linear and yarn, and rope_freqs.weight with the first two."
        )
    if kind == "yarn":
        return yarn(settings, factor)
    factor = 1.0 if kind == "none" else factor
    if own:
        factors = [number * factor for number in file.floats("rope_freqs.weight")]
        longrope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        return longrope | {"attention_factor": 1.0, "factor": 1.0}
    return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def yarn(settings: Settings, factor: float) -> dict[str, Any]:
    """YaRN. The file has one of DeepSeek's two temperatures, which are equal in its models."""
    if settings.get("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise UnsupportedFeatureError(
            f"{settings.file.path} sets yarn_ext_factor; this version has 1."
        )
    fields: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": settings.get(
            "rope.scaling.original_context_length", settings.need("context_length")
        ),
        "beta_fast": settings.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": settings.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": settings.get("rope.scaling.yarn_attn_factor"),
    }
    multiplier = settings.get("rope.scaling.yarn_log_multiplier")
    if multiplier:
        fields |= dict.fromkeys(("mscale", "mscale_all_dim"), multiplier / YARN_MSCALE)
    return {name: value for name, value in fields.items() if value is not None}
