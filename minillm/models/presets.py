"""Configurations of well-known models, for cost predictions and dummy weights without a download.

All values are those of the published ``config.json`` files; `tests/models/test_presets.py` builds
each model with transformers and compares the parameter counts exactly.
"""

from collections.abc import Mapping
from types import MappingProxyType

from minillm.config import MLAConfig, ModelConfig, MoEConfig, RopeConfig
from minillm.errors import ConfigError, did_you_mean


def preset(name: str) -> ModelConfig:
    """The configuration called `name`; raises ConfigError with the nearest known name."""
    if name not in PRESETS:
        raise ConfigError(
            f"There is no preset {name!r}.{did_you_mean(name, PRESETS)} "
            f"Known presets are {', '.join(PRESETS)}."
        )
    return PRESETS[name]


def _llama31(hidden: int, layers: int, heads: int, intermediate: int) -> ModelConfig:
    """Llama 3.1 (2024): grouped-query attention with 8 KV heads at every size."""
    return ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        max_position_embeddings=131072,
        rope=RopeConfig(
            theta=500000.0,
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        rms_norm_eps=1e-5,
    )


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, tied: bool) -> ModelConfig:
    """Qwen3 (2025): RMSNorm of query and key heads; head size 128 for every hidden size."""
    return ModelConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        max_position_embeddings=40960,
        rope=RopeConfig(theta=1000000.0),
        qk_norm=True,
        tie_word_embeddings=tied,
    )


def _deepseek(
    family: str,
    vocab: int,
    hidden: int,
    layers: int,
    heads: int,
    intermediate: int,
    q_lora_rank: int | None,
    dense_layers: int,
    mscale: float,
    moe: MoEConfig,
) -> ModelConfig:
    """DeepSeek-V2 and V3 (2024): MLA; the first layers are dense, the others MoE.

    `head_dim` is the width of a query head; every head has its own expanded key and value.
    """
    return ModelConfig(
        family=family,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128 + 64,
        intermediate_size=intermediate,
        max_position_embeddings=163840,
        rope=RopeConfig(
            theta=10000.0,
            rope_type="yarn",
            factor=40.0,
            original_max_position_embeddings=4096,
            mscale=mscale,
            mscale_all_dim=mscale,
            interleaved=True,
        ),
        mla=MLAConfig(
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            q_lora_rank=q_lora_rank,
        ),
        moe=moe,
        moe_layers=tuple(layer >= dense_layers for layer in range(layers)),
    )


_LLAMA_2_7B = ModelConfig(
    family="llama",
    vocab_size=32000,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=11008,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    dtype="float16",
)

# Version 0.1, which has a sliding window.
_MISTRAL_7B = ModelConfig(
    family="mistral",
    vocab_size=32000,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    sliding_windows=(4096,) * 32,
)

_MIXTRAL_8X7B = ModelConfig(
    family="mixtral",
    vocab_size=32000,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    max_position_embeddings=32768,
    rope=RopeConfig(theta=1000000.0),
    rms_norm_eps=1e-5,
    moe=MoEConfig(num_experts=8, num_experts_per_token=2, intermediate_size=14336),
)

_QWEN25_3B = ModelConfig(
    family="qwen2",
    vocab_size=151936,
    hidden_size=2048,
    num_layers=36,
    num_heads=16,
    num_kv_heads=2,
    head_dim=128,
    intermediate_size=11008,
    max_position_embeddings=32768,
    rope=RopeConfig(theta=1000000.0),
    qkv_bias=True,
    tie_word_embeddings=True,
)

_DEEPSEEK_V2_LITE = _deepseek(
    family="deepseek_v2",
    vocab=102400,
    hidden=2048,
    layers=27,
    heads=16,
    intermediate=10944,
    q_lora_rank=None,
    dense_layers=1,
    mscale=0.707,
    moe=MoEConfig(
        num_experts=64,
        num_experts_per_token=6,
        intermediate_size=1408,
        shared_intermediate_size=2 * 1408,
        normalize=False,
    ),
)

_DEEPSEEK_V2 = _deepseek(
    family="deepseek_v2",
    vocab=102400,
    hidden=5120,
    layers=60,
    heads=128,
    intermediate=12288,
    q_lora_rank=1536,
    dense_layers=1,
    mscale=1.0,
    moe=MoEConfig(
        num_experts=160,
        num_experts_per_token=6,
        intermediate_size=1536,
        shared_intermediate_size=2 * 1536,
        normalize=False,
        routed_scaling_factor=16.0,
        num_groups=8,
        topk_groups=3,
    ),
)

# The main model of 671 B parameters, without the checkpoint's 62nd layer, which drafts tokens
# (multi-token prediction).
_DEEPSEEK_V3 = _deepseek(
    family="deepseek_v3",
    vocab=129280,
    hidden=7168,
    layers=61,
    heads=128,
    intermediate=18432,
    q_lora_rank=1536,
    dense_layers=3,
    mscale=1.0,
    moe=MoEConfig(
        num_experts=256,
        num_experts_per_token=8,
        intermediate_size=2048,
        shared_intermediate_size=2048,
        scoring="sigmoid",
        routed_scaling_factor=2.5,
        num_groups=8,
        topk_groups=4,
        group_score="top2",
        score_bias=True,
    ),
)

_SMOLLM2_135M = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    max_position_embeddings=8192,
    rope=RopeConfig(theta=100000.0),
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llama-2-7b": _LLAMA_2_7B,
        "llama-3.1-8b": _llama31(4096, 32, 32, 14336),
        "llama-3.1-70b": _llama31(8192, 80, 64, 28672),
        "llama-3.1-405b": _llama31(16384, 126, 128, 53248),
        "mistral-7b": _MISTRAL_7B,
        "mixtral-8x7b": _MIXTRAL_8X7B,
        "qwen2.5-3b": _QWEN25_3B,
        "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
        "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
        "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
        "deepseek-v2": _DEEPSEEK_V2,
        "deepseek-v3": _DEEPSEEK_V3,
        "smollm2-135m": _SMOLLM2_135M,
    }
)
