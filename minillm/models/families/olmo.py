"""OLMo-2."""

from minillm.config import ModelConfig
from minillm.models.families.fields import Fields, common, flag, number


def olmo2(data: Fields) -> ModelConfig:
    """OLMo-2 (OLMo team, 2025, arXiv 2501.00656): norms behind attention and MLP, and over all
    heads of the queries and of the keys."""
    bias, eps = flag(data, "attention_bias"), number(data, "rms_norm_eps", 1e-5)
    return common(data, "olmo2", rms_norm_eps=eps, qkv_bias=bias, output_bias=bias, post_norm=True)
