"""Small decoders with mixtures of experts and latent attention, in sizes that panels have."""

from dataclasses import replace

from minillm.config import MLAConfig, MoEConfig, RopeConfig
from tests.ops.small_decoders import BASE

MIXED = MoEConfig(8, 3, 64)
SHARED = replace(MIXED, shared_intermediate_size=128, normalize=False)
QWEN = replace(BASE, family="qwen3_moe", qk_norm=True, moe=MIXED)
LATENT = replace(
    BASE,
    family="deepseek_v2",
    num_kv_heads=4,
    mla=MLAConfig(64, 32, 16, 32),
    rope=RopeConfig(interleaved=True),
)
YARN = RopeConfig(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=64,
    mscale=0.707,
    mscale_all_dim=0.707,
    interleaved=True,
)
GROUPS = replace(SHARED, num_groups=4, topk_groups=2, routed_scaling_factor=1.7)
SPARSE = {
    "qwen3 with experts": QWEN,
    "experts in some layers": replace(QWEN, moe_layers=(True, False, True)),
    "mixtral": replace(BASE, family="mixtral", moe=MoEConfig(4, 2, 96)),
    "experts, windows, biases": replace(
        QWEN, sliding_windows=(None, 7, 20), qkv_bias=True, output_bias=True
    ),
    "all experts": replace(QWEN, moe=replace(MIXED, num_experts_per_token=8)),
    "latent": LATENT,
    "latent, low-rank queries, biases": replace(
        LATENT, mla=replace(LATENT.mla, q_lora_rank=32), qkv_bias=True, output_bias=True
    ),
    "latent, a window": replace(LATENT, sliding_windows=(None, 7, 20)),
    "deepseek v2 lite": replace(LATENT, rope=YARN, moe=SHARED, moe_layers=(False, True, True)),
    "deepseek v2": replace(
        LATENT,
        mla=replace(LATENT.mla, q_lora_rank=32),
        moe=GROUPS,
        moe_layers=(False, True, True),
        mlp_bias=True,
    ),
    "deepseek v3": replace(
        LATENT,
        family="deepseek_v3",
        mla=replace(LATENT.mla, q_lora_rank=32),
        rope=YARN,
        moe=replace(GROUPS, normalize=True, scoring="sigmoid", group_score="top2", score_bias=True),
        moe_layers=(False, True, True),
    ),
}
