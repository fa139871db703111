"""A GGUF file as a model: its configuration, end tokens and recommended sampling parameters."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from minillm.config import ModelConfig
from minillm.errors import CheckpointError, ConfigError, UnsupportedFeatureError
from minillm.gguf.container import GGUFFile, open_gguf
from minillm.gguf.defaults import end_ids
from minillm.gguf.names import places
from minillm.gguf.settings import config_fields
from minillm.models.families import parse_config

SAMPLING: Mapping[str, str] = {  # names in generation_config.json
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def open_gguf_model(path: Path) -> tuple[ModelConfig, dict[str, Any], int, Mapping[str, Any]]:
    """What a file says about its model, without reading its weights: the configuration, the fields
    of a generation_config.json, the number of ignored layers, and how weights are quantised.

    Raises:
        CheckpointError: the file is damaged or has tensors of other models.
        ConfigError, UnsupportedFeatureError: the model is not supported.
    """
    file = open_gguf(path)
    fields = config_fields(file)
    try:
        config = parse_config(fields)
    except (ConfigError, UnsupportedFeatureError) as error:
        raise type(error)(str(error).replace("config.json", f"the metadata of {path}")) from error
    config = replace(config, **flags_of_tensors(file, config))
    quantized = any(not tensor.type.is_plain for tensor in file.tensors.values())
    ignored = int(fields["num_nextn_predict_layers"])
    return config, generation_fields(file), ignored, {"quant_method": "gguf"} if quantized else {}


def flags_of_tensors(file: GGUFFile, config: ModelConfig) -> dict[str, Any]:
    """What only the tensors say: biases, and which layers have experts."""
    names = places(file)
    first = "model.layers.0.self_attn"
    flags: dict[str, Any] = {"output_bias": f"{first}.o_proj.bias" in names}
    if config.moe:
        routers = {name.split(".")[2] for name in names if name.endswith(".gate.weight")}
        flags["moe_layers"] = tuple(str(i) in routers for i in range(config.num_layers))
    return flags


def generation_fields(file: GGUFFile) -> dict[str, Any]:
    """End tokens and sampling parameters, as in a generation_config.json."""
    ids = end_ids(file.fields)
    if not all(isinstance(i, int) for i in ids):
        raise CheckpointError(f"{file.path} gives the end-of-sequence ids {ids}; ids are integers.")
    sampling = {
        ours: file.fields[f"general.sampling.{name}"]
        for name, ours in SAMPLING.items()
        if f"general.sampling.{name}" in file.fields
    }
    return sampling | {"eos_token_id": ids}
