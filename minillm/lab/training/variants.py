"""Four attention variants with equal training, for the comparison of chapter 04.

MHA, GQA, MQA and MLA have equal numbers of parameters (within 2 %). Parameters saved in projections
are added to the MLP, as in Shazeer (2019, section 4) for MQA. GQA has four query heads per KV head.
MLA has DeepSeek-V2's proportions: a rotated part of half a head and a latent of 3.5 heads (4 in
DeepSeek-V2), so that it caches as many values as GQA's two keys and two values.

Each variant has the norms of its published form: Qwen3's on queries and keys, V2-Lite's on the
latent. `notebooks/variants/README.md` says how they were trained.
"""

from collections.abc import Mapping
from types import MappingProxyType

from minillm.config import MLAConfig, ModelConfig, RopeConfig
from minillm.lab.training.recipes import VOCAB_SIZE

WINDOW = 256  # tokens of a training row
WIDTH, LAYERS, HEADS, HEAD_DIM = 256, 4, 8, 32
MLA = MLAConfig(kv_lora_rank=112, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)


def _variant(kv_heads: int, mlp: int, mla: MLAConfig | None = None) -> ModelConfig:
    """Qwen3's architecture, or with `mla` DeepSeek-V2's without experts."""
    return ModelConfig(
        family="deepseek_v2" if mla else "qwen3",
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else HEAD_DIM,
        intermediate_size=mlp,
        max_position_embeddings=WINDOW,
        rope=RopeConfig(interleaved=bool(mla)),
        tie_word_embeddings=True,
        qk_norm=mla is None,
        mla=mla,
    )


VARIANTS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "mha": _variant(HEADS, mlp=256),
        "gqa": _variant(2, mlp=384),
        "mqa": _variant(1, mlp=408),
        "mla": _variant(HEADS, mlp=264, mla=MLA),
    }
)
