"""transformers models of our configurations' shapes, built from transformers' own classes."""

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel

from minillm.config import ModelConfig


def hf_config(config: ModelConfig) -> Any:
    """The transformers configuration of the same shape (default RoPE: it has no parameters)."""
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "pad_token_id": None,
    }
    if config.sliding_windows:
        values["sliding_window"] = config.sliding_windows[0]
    if config.mla is None:
        values["head_dim"] = config.head_dim
    else:
        for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
            values[name] = getattr(config.mla, name)
        values["v_head_dim"] = config.mla.v_head_dim
    if config.moe is not None:
        values |= _moe_values(config)
    return CONFIG_MAPPING[config.family](**values)


def _moe_values(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    if config.family == "mixtral":
        return {
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_experts_per_token,
        }
    return {
        "num_experts": moe.num_experts,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "n_shared_experts": moe.shared_intermediate_size // moe.intermediate_size,
        "first_k_dense_replace": config.moe_layers.index(True) if config.moe_layers else 0,
        "n_group": moe.num_groups,
        "topk_group": moe.topk_groups,
        "topk_method": "greedy" if moe.num_groups == 1 else "group_limited_greedy",
    }


def hf_model(config: ModelConfig, device: str) -> PreTrainedModel:
    """The transformers model; on "meta" it has shapes and no memory."""
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            hf_config(config),
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
        )
    model.tie_weights()
    return model.eval()
