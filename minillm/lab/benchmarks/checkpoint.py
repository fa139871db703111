"""Writes a preset as a Hugging Face folder with random bf16 weights, so that all engines of a
comparison load the same checkpoint.

Only plain decoders are supported, which all engines can run. A preset that is cut to its first
layers can be of any family: its own config.json is written. The tokenizer has one token per byte
and filler tokens up to the size of the vocabulary, so that every id has a text.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minillm.config import ModelConfig
from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.models.families import parse_config
from minillm.models.presets import FOLDER, preset
from minillm.plan import machine

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
)
END = "<|endoftext|>"
COMPLETE = "complete"  # written last: marks a complete folder


def cache_folder() -> Path:
    """The folder of checkpoints, exports and logs: ``~/.cache/minillm/bench``."""
    return machine.cache_folder() / "bench"


def checkpoint_of(name: str, dtype: str = "bfloat16", layers: int | None = None) -> Path:
    """The folder of a preset, or of its first `layers` layers, written at the first use."""
    config = preset(name)
    if layers is None:
        check_writable(name, config)
        fields = huggingface_config(config, dtype)
    else:
        fields = first_layers(name, config, layers) | {"torch_dtype": dtype}
        config = parse_config(fields)
    folder = cache_folder() / "-".join([name, *([] if layers is None else [f"{layers}l"]), dtype])
    if not (folder / COMPLETE).exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            write_checkpoint(config, part, dtype, fields)
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def gguf_of(folder: Path, dtype: str) -> Path:
    """A checkpoint as a GGUF file without a tokenizer, for llama.cpp, written at the first use."""
    from minillm.lab.quantise.gguf_export import write_model
    from minillm.models.checkpoint import open_model

    stamp = (folder / "config.json").stat().st_mtime_ns
    path = cache_folder() / "llamacpp" / f"{folder.resolve().name}-{stamp:x}-{dtype}.gguf"
    if not path.exists():
        kind = {"bfloat16": "BF16", "float32": "F32"}[dtype]
        write_model(open_model(folder), path, kind, has_tokenizer=False)
    return path


def check_writable(name: str, config: ModelConfig) -> None:
    """Reject models that are not plain decoders."""
    plain = config.mla is None and config.moe is None and config.rope.rope_type == "default"
    if config.family not in ARCHITECTURES or not plain:
        raise UnsupportedFeatureError(
            f"preset:{name} cannot be written as a checkpoint for other engines; give the folder "
            "of a checkpoint, or leave out --vs."
        )


def first_layers(name: str, config: ModelConfig, layers: int) -> dict[str, Any]:
    """The config.json of a preset, cut to its first layers."""
    if not 1 <= layers <= config.num_layers:
        raise ConfigError(
            f"--layers is {layers}; preset:{name} has {config.num_layers}, so it must be between 1 "
            f"and {config.num_layers}."
        )
    fields = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return fields | {"num_hidden_layers": layers}


def write_checkpoint(
    config: ModelConfig, folder: Path, dtype: str, fields: Mapping[str, Any]
) -> None:
    """Write config.json with these fields, generation_config.json, model.safetensors and a
    tokenizer."""
    from safetensors.torch import save_file

    from minillm.models.decoder import Decoder
    from minillm.models.loader import DTYPES

    model = Decoder(config, DTYPES[dtype])
    model.initialize(seed=0)
    tensors = {name: each.target.contiguous() for name, each in model.checkpoint_tensors().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    end = config.vocab_size - 1
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    write_json(folder / "config.json", dict(fields) | ids)
    write_json(folder / "generation_config.json", ids)
    write_tokenizer(config, folder)
    write_json(folder / COMPLETE, {})


def huggingface_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of these families; RoPE's theta is under its new and its old name."""
    windows = set(config.sliding_windows)
    return {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.family == "llama" and config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "sliding_window": windows.pop() if len(windows) == 1 else None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def write_tokenizer(config: ModelConfig, folder: Path) -> None:
    """Write a tokenizer: one token per byte, filler tokens, and the end token as the last id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + [f"Ġt{number}" for number in range(len(alphabet), config.vocab_size - 1)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {END: config.vocab_size - 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
