"""A model's configuration and its tokenizer as the metadata of a GGUF file, the inverse of
`gguf/settings.py` and `text/gguf.py`."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken
from torch import Tensor

from minillm.config import ModelConfig, RopeConfig
from minillm.errors import ModelNotFoundError, UnsupportedFeatureError
from minillm.gguf.defaults import END_TOKENS, UNUSED
from minillm.layers.rope import inverse_frequencies
from minillm.models.checkpoint import ModelSource
from minillm.models.gguf import SAMPLING
from minillm.text.gguf import CONTROL, NAMES, NORMAL, USER_DEFINED
from minillm.text.gguf_splits import SPLITS, Splits
from minillm.text.tokenizer import Tokenizer

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
     "qwen3_moe": "qwen3moe"}
)  # fmt: skip
FILE_TYPES: Mapping[str, int] = MappingProxyType(  # general.file_type
    {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}
)


def metadata(source: ModelSource, kind: str) -> dict[str, Any]:
    """The fields that describe the model, its end tokens and its sampling parameters."""
    config = source.config
    arch = ARCHITECTURES[config.family]
    own: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        **rope_fields(config.rope),
    }
    if config.moe:
        own |= {
            "expert_count": config.moe.num_experts,
            "expert_used_count": config.moe.num_experts_per_token,
            "expert_feed_forward_length": config.moe.intermediate_size,
        }
    if config.sliding_windows:
        own["attention.sliding_window"] = config.sliding_windows[0]
    ends = dict(zip(END_TOKENS, source.eos_token_ids, strict=False))
    sampling = {theirs: source.sampling_defaults.get(ours) for theirs, ours in SAMPLING.items()}
    return {
        "general.architecture": arch,
        "general.name": Path(source.name).name,
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": 2,
        **{f"{arch}.{name}": value for name, value in own.items()},
        **{f"tokenizer.ggml.{name}_token_id": value for name, value in ends.items()},
        **{f"general.sampling.{k}": v for k, v in sampling.items() if v is not None},
    }


def check_writable(config: ModelConfig, num_ends: int) -> None:
    """Raise UnsupportedFeatureError if GGUF, as llama.cpp reads it, cannot describe the model."""
    windows, rope = config.sliding_windows, config.rope
    llama = ARCHITECTURES.get(config.family) == "llama"
    reasons = {
        f"its family is {config.family} (written are {', '.join(ARCHITECTURES)})":
            config.family not in ARCHITECTURES,
        "some of its layers have no experts":
            config.moe is not None and bool(config.moe_layers) and not all(config.moe_layers),
        "the weights of its experts are not normalised":
            config.moe is not None and not config.moe.normalize,
        "its layers have different sliding windows": len(set(windows)) > 1,
        "it has a sliding window": bool(windows) and not llama,
        f"it has {num_ends} end tokens (at most {len(END_TOKENS)})": num_ends > len(END_TOKENS),
        f"its RoPE is {rope.rope_type}": rope.rope_type in ("dynamic", "longrope"),
        "its YaRN has an own attention factor": rope.rope_type == "yarn"
            and (rope.attention_factor, rope.mscale, rope.truncate) != (None, None, True),
    }  # fmt: skip
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedFeatureError(f"This model cannot be written as a GGUF file: {reason}.")


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """The fields of the position encoding; llama3 has a tensor instead (`frequency_factors`)."""
    fields: dict[str, Any] = {"rope.freq_base": rope.theta}
    if rope.rope_type in ("linear", "yarn"):
        fields |= {"rope.scaling.type": rope.rope_type, "rope.scaling.factor": rope.factor}
    if rope.rope_type == "yarn":
        fields |= {
            "rope.scaling.yarn_beta_fast": rope.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.beta_slow,
        }
        if rope.original_max_position_embeddings:
            length = rope.original_max_position_embeddings
            fields["rope.scaling.original_context_length"] = length
    return fields


def frequency_factors(config: ModelConfig) -> Tensor | None:
    """What llama3 RoPE divides each frequency by, float32 [D / 2]; None for other schemes."""
    if config.rope.rope_type != "llama3":
        return None
    length = config.max_position_embeddings
    plain, scaled = (
        inverse_frequencies(rope, config.head_dim, length, length)
        for rope in (replace(config.rope, rope_type="default"), config.rope)
    )
    return plain / scaled


# ---- the tokenizer -------------------------------------------------------------------------------


def tokenizer_fields(folder: Path | None, vocab_size: int) -> dict[str, Any]:
    """The `tokenizer.*` fields of a file for a model with `vocab_size` logits. Without a tokenizer,
    the file says so.

    Raises:
        UnsupportedFeatureError: GGUF has no name for a part of the tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_folder(folder) if folder else None
    except ModelNotFoundError:
        tokenizer = None
    if folder is None or tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    state = json.loads(tokenizer._backend.to_str())
    if state["model"]["type"] != "BPE" or tokenizer.token_bytes is None:
        raise UnsupportedFeatureError(
            f"The tokenizer of {folder} is not byte-level BPE; this version writes only that kind "
            "into a GGUF file."
        )
    tokens, kinds = vocabulary(tokenizer, vocab_size)
    merges = state["model"]["merges"]
    begins, ends = around(tokenizer)
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": splits_name(folder, state),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.add_bos_token": begins,
        "tokenizer.ggml.add_eos_token": ends,
    }
    for theirs, ours in NAMES.items():
        token = tokenizer.special_tokens.get(f"{ours}_token")
        if token is not None:
            fields[f"tokenizer.ggml.{theirs}_token_id"] = tokenizer._backend.token_to_id(token)
    if tokenizer._template is not None:
        fields["tokenizer.chat_template"] = tokenizer._template.source
    return fields


def vocabulary(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[str], list[int]]:
    """Token and type of each id; ids without a token are unused."""
    added: dict[int, AddedToken] = tokenizer._backend.get_added_tokens_decoder()
    for token in added.values():
        normalized = token.normalized and tokenizer._backend.normalizer is not None
        if token.lstrip or token.rstrip or token.single_word or normalized:
            raise UnsupportedFeatureError(
                f"The added token {token.content!r} depends on the text around it or is found "
                "after normalisation, which a GGUF file cannot say."
            )
    by_id = {i: t for t, i in tokenizer._backend.get_vocab(with_added_tokens=True).items()}
    count = max(vocab_size, tokenizer.vocab_size)
    kinds = [NORMAL if i in by_id else UNUSED for i in range(count)]
    for i, token in added.items():
        kinds[i] = CONTROL if token.special else USER_DEFINED
    return [by_id.get(i, f"[PAD{i}]") for i in range(count)], kinds


def splits_name(folder: Path, state: dict[str, Any]) -> str:
    """GGUF's name of the pre-tokenizer and normalizer."""
    wanted = steps(state["pre_tokenizer"]), state["normalizer"], state["model"]["ignore_merges"]
    for name, splits in SPLITS.items():
        if described(splits) == wanted:
            return name
    raise UnsupportedFeatureError(
        f"The pre-tokenizer of {folder} has no name in GGUF; names are {', '.join(SPLITS)}."
    )


def described(splits: Splits) -> tuple[Any, Any, bool]:
    """What `splits_name` compares."""
    normalizer = splits.normalizer() if splits.normalizer else None
    return (
        steps(json.loads(splits.build().__getstate__())),
        None if normalizer is None else json.loads(normalizer.__getstate__()),
        splits.ignore_merges,
    )


def steps(state: Any) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer, without settings that only change offsets."""
    found = state.get("pretokenizers", [state]) if state else []
    return [{key: value for key, value in step.items() if key != "trim_offsets"} for step in found]


def around(tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Whether bos and eos are added to every text."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=add) for add in (False, True))
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    found = whole[:at], whole[at + len(plain) :]
    ids = [
        tokenizer._backend.token_to_id(tokenizer.special_tokens.get(name, ""))
        for name in ("bos_token", "eos_token")
    ]
    if any(got not in ([], [due]) for got, due in zip(found, ids, strict=True)):
        raise UnsupportedFeatureError(
            f"The tokenizer of {tokenizer.origin} adds other tokens than bos and eos around a "
            "text, which a GGUF file cannot say."
        )
    return bool(found[0]), bool(found[1])
