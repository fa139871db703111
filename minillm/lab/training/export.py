"""Exports a training checkpoint as a folder that transformers and `LLM(...)` load."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from minillm.config import ModelConfig
from minillm.lab.benchmarks import checkpoint
from minillm.lab.training.data import END_OF_TEXT, TOKENIZER
from minillm.models.decoder import Decoder


def export(model: Decoder, folder: Path) -> None:
    """Write config, bf16 weights, generation defaults and tokenizer into `folder`. There is no chat
    template, because the models are not trained on chats."""
    folder.mkdir(parents=True, exist_ok=True)
    ends = {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT}
    files: dict[str, dict[str, Any]] = {
        "config.json": checkpoint.huggingface_config(model.config, "bfloat16") | ends,
        "generation_config.json": ends | {"pad_token_id": END_OF_TEXT},
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
