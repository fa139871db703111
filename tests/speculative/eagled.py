"""A random EAGLE layer for any model, and an engine whose every draft is computed again."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minillm.models.checkpoint import open_model
from minillm.speculative.heads import HeadsSource, base_hash, tensors_of


def write_eagle(model: Path, folder: Path, **fields: Any) -> Path:
    """A layer with random weights; `fields` of heads.json are replaced."""
    source, dice = open_model(model), torch.Generator().manual_seed(0)
    depths = sorted({1, -(-source.config.num_layers // 2), source.config.num_layers})
    made = HeadsSource("eagle", folder, 1, source.config, depths=tuple(depths))
    tensors = {}
    for name, tensor in tensors_of(made.build(torch.float32)).items():
        shape = tensor.slice.shape
        noise = torch.randn(shape, generator=dice)
        tensors[name] = 1 + noise * 0.2 if "norm" in name else noise * 2 * shape[-1] ** -0.5
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    card = {"method": "eagle", "depths": depths, "base_model": str(model),
            "base_hash": base_hash(source)} | fields  # fmt: skip
    (folder / "heads.json").write_text(json.dumps(card))
    return folder
