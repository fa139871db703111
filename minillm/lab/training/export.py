"""Exports a training checkpoint as a folder that transformers and `LLM(...)` load."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from minillm.config import MLAConfig, ModelConfig
from minillm.lab.benchmarks import checkpoint
from minillm.lab.training.data import END_OF_TEXT, TOKENIZER
from minillm.models.decoder import Decoder


def huggingface_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a Qwen3 or, with latent attention, a DeepSeek-V2 model."""
    mla, fields = config.mla, checkpoint.huggingface_config(config, "bfloat16")
    fields |= {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT}
    if mla is not None:
        del fields["head_dim"]
        fields |= dense_deepseek(config, mla)
    return fields


def dense_deepseek(config: ModelConfig, mla: MLAConfig) -> dict[str, Any]:
    """DeepSeek-V2's own fields. The format cannot say "without experts", so the index of the first
    layer with experts is set to the number of layers."""
    return {
        **vars(mla),
        "first_k_dense_replace": config.num_layers,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": config.intermediate_size,
    }


def export(model: Decoder, folder: Path) -> None:
    """Write config, bf16 weights, generation defaults and tokenizer into `folder`. There is no chat
    template, because the models are not trained on chats."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Any]] = {
        "config.json": huggingface_config(model.config),
        "generation_config.json": {f"{n}_token_id": END_OF_TEXT for n in ("bos", "eos", "pad")},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.config.max_position_embeddings,
        },
    }
    for name, content in files.items():
        checkpoint.write_json(folder / name, content)
    (folder / TOKENIZER.name).write_bytes(TOKENIZER.read_bytes())
    tensors = {
        name: tensor.target.to(torch.bfloat16).contiguous()
        for name, tensor in model.checkpoint_tensors().items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def load_trained(path: Path, config: ModelConfig) -> Decoder:
    """The float32 model of a training checkpoint."""
    model = Decoder(config)
    tensors = load_file(path)
    for name, tensor in model.checkpoint_tensors().items():
        tensor.target.copy_(tensors[f"model/{name}"])
    return model.eval()
