"""Tiny random checkpoints of every family, built and written by transformers itself.

Weights are drawn with a standard deviation of 0.15, not transformers' 0.02: with 0.02 attention is
so flat that a model without RoPE passes. Norms, biases and router biases, which transformers sets
to constants, are perturbed, so that leaving one out changes the output.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 128
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-3,  # large enough to see in the output when it is not used
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 20},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    # head_dim is given because transformers' own RoPE code fails where it is null
    "mixtral": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "head_dim": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "deepseek_v2": MLA,
    "deepseek_v3": MLA | {"n_group": 4, "topk_group": 2},
    "olmo2": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "phi3": {},
}


@dataclass(frozen=True)
class Tiny:
    """One tiny checkpoint: a family, what differs from its usual fields, and its RoPE."""

    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] | None = None
    shard_size: str = "1GB"
    max_model_len: int | None = None  # for RoPE types whose frequencies depend on it
    seed: int = 0

    def config(self) -> PreTrainedConfig:
        """The transformers configuration."""
        rope = {} if self.rope is None else {"rope_parameters": {"rope_theta": 10000.0} | self.rope}
        return CONFIG_MAPPING[self.family](**(BASE | FAMILY[self.family] | self.fields | rope))

    def build(self) -> PreTrainedModel:
        """The transformers model, in float32, with plain ("eager") attention."""
        config = self.config()
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(self.seed)
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=torch.float32
            )
            perturb(model)
        return model.eval()

    def write(self, folder: Path) -> "Checkpoint":
        """Build the model and save it as transformers does."""
        model = self.build()
        model.save_pretrained(folder, max_shard_size=self.shard_size)
        return Checkpoint(folder, model, self)


def perturb(model: PreTrainedModel) -> None:
    """Random values for everything that transformers initialises to a constant."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name:
            value.add_(torch.randn_like(value) * 0.2)
        elif name.endswith("e_score_correction_bias"):
            value.copy_(torch.randn_like(value) * 0.3)
        elif name.endswith(".bias"):
            value.copy_(torch.randn_like(value) * 0.2)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder beside the transformers model that wrote it."""

    folder: Path
    reference: PreTrainedModel
    tiny: Tiny

    @cached_property
    def config(self) -> dict[str, Any]:
        """The parsed config.json."""
        return json.loads((self.folder / "config.json").read_text())


def old_style(config: dict[str, Any]) -> dict[str, Any]:
    """The same config.json as transformers 4 wrote it: `rope_theta` and `rope_scaling`."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = None if rope["type"] == "default" else rope
    return old


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [length]."""
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Rope:
    """A RoPE variant and the context it is to be tested at."""

    parameters: dict[str, Any]
    max_position_embeddings: int = 256
    max_model_len: int | None = None

    def tiny(self, family: str) -> Tiny:
        """A two-layer checkpoint of `family` with this variant."""
        parameters = dict(self.parameters)
        fields = {"num_hidden_layers": 2, "max_position_embeddings": self.max_position_embeddings}
        half = (BASE | FAMILY[family]).get("qk_rope_head_dim")
        half = (half or (BASE | FAMILY[family]).get("head_dim") or 16) // 2
        for name in ("short_factor", "long_factor"):
            if name in parameters:  # one factor per rotated pair of dimensions
                values = parameters[name]
                parameters[name] = [values[i % len(values)] for i in range(half)]
        return Tiny(family, fields, parameters, max_model_len=self.max_model_len, seed=1)


# Prompts have 130 tokens: "below" and "beyond" say on which side of the trained length that is.
ROPES: dict[str, Rope] = {
    "default": Rope({"rope_type": "default", "rope_theta": 500.0}),
    "linear": Rope({"rope_type": "linear", "factor": 2.5}),
    "dynamic, below": Rope({"rope_type": "dynamic", "factor": 4.0}, max_model_len=200),
    "dynamic, beyond": Rope({"rope_type": "dynamic", "factor": 4.0}, 64, max_model_len=130),
    "llama3": Rope(
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    ),
    "yarn": Rope(YARN),
    "yarn, truncate=False": Rope(YARN | {"truncate": False, "beta_fast": 4.0, "beta_slow": 0.5}),
    "yarn, attention_factor": Rope(YARN | {"attention_factor": 0.8}),
    "yarn, mscale": Rope(YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}),
    "yarn, equal mscale": Rope(YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}),
    "longrope, below": Rope(LONGROPE | {"original_max_position_embeddings": 140}, 256, 140),
    "longrope, beyond": Rope(LONGROPE | {"original_max_position_embeddings": 64}),
    "longrope, factor": Rope(
        LONGROPE | {"original_max_position_embeddings": 64, "factor": 3.0, "attention_factor": 1.2}
    ),
}

# The variants of a family whose transformers model does not have all of them.
ROPES_OF: dict[str, tuple[str, ...]] = {
    "phi3": ("default", "longrope, below", "longrope, beyond", "longrope, factor")
}
ROPE_CASES = [
    f"{family} / {rope}" for family in FAMILY for rope in ROPES_OF.get(family, tuple(ROPES))
]

CASES: dict[str, Tiny] = {
    "llama": Tiny("llama", shard_size="40KB"),
    "llama, tied": Tiny("llama", {"tie_word_embeddings": True}),
    "llama, biases": Tiny(
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True},
        shard_size="40KB",
    ),
    "llama, multi-query": Tiny("llama", {"num_key_value_heads": 1}),
    "mistral": Tiny("mistral", shard_size="40KB"),
    "mistral, tied, no window": Tiny(
        "mistral", {"sliding_window": None, "tie_word_embeddings": True}
    ),
    "qwen2": Tiny("qwen2", {"tie_word_embeddings": True}),
    "qwen2, sliding": Tiny(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        shard_size="40KB",
    ),
    "qwen3": Tiny("qwen3", shard_size="40KB"),
    "qwen3, tied, sliding": Tiny(
        "qwen3",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": Tiny("mixtral", shard_size="40KB"),
    "mixtral, tied, window": Tiny("mixtral", {"sliding_window": 20, "tie_word_embeddings": True}),
    "qwen3_moe": Tiny("qwen3_moe", {"mlp_only_layers": [1]}, shard_size="40KB"),
    "qwen3_moe, tied, sparse step": Tiny(
        "qwen3_moe",
        {
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
        },
    ),
    "deepseek_v2": Tiny(  # as V2-Lite
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2},
        YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        shard_size="40KB",
    ),
    "deepseek_v2, groups": Tiny(  # as V2
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "n_shared_experts": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3": Tiny(
        "deepseek_v3", {}, YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, shard_size="40KB"
    ),
    "deepseek_v3, tied, one group": Tiny(
        "deepseek_v3",
        {
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.3,
            "n_shared_experts": 2,
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_interleave": False,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": Tiny("olmo2", shard_size="40KB"),
    "olmo2, tied, biases": Tiny("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "phi3": Tiny("phi3", {"sliding_window": 20}, shard_size="40KB"),
    "phi3, tied": Tiny("phi3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "smollm3": Tiny("smollm3", {"tie_word_embeddings": False}, shard_size="40KB"),
    "smollm3, tied, window": Tiny(
        "smollm3",
        {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 20,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
}
