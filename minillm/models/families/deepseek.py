"""DeepSeek-V2 and V3."""

from minillm.config import MLAConfig, ModelConfig, MoEConfig
from minillm.errors import UnsupportedFeatureError
from minillm.models.families.fields import Fields, common, flag, integer, number, only, rope_config


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
