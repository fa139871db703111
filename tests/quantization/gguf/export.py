"""Writes a tiny Hugging Face checkpoint as GGUF with the `gguf` package: its writer, its table of
tensor names and its quantisers. The metadata are those of llama.cpp's convert_hf_to_gguf.py."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}
EXPERTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


SCALES = {  # where the float16 scales of a K block are, and about the range of the weights
    Type.Q2_K: ((80, 82), 0.3), Type.Q3_K: ((108,), 0.3), Type.Q4_K: ((0, 2), 0.5),
    Type.Q5_K: ((0, 2), 1.0), Type.Q6_K: ((208,), 3.0),
}  # fmt: skip


def no_vocabulary(writer: gguf.GGUFWriter) -> None:
    """A file without a tokenizer."""
    writer.add_tokenizer_model("none")


def export(
    folder: Path,
    config: dict[str, Any],
    path: Path,
    kind: Type | Callable[[str], Type] = Type.F32,
    vocabulary: Callable[[gguf.GGUFWriter], None] = no_vocabulary,
) -> Path:
    """Write `folder` as a GGUF file with matrices of type `kind`, where their width allows it. A
    function gives the type of a tensor by its name in the file; K types get random blocks."""
    arch = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    vocabulary(writer)
    add_metadata(writer, config, arch)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    for name, tensor in renamed(folder, config, arch).items():
        full = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert full is not None, name
        array = tensor.float().numpy()
        own = kind if isinstance(kind, Type) else kind(full)
        block = gguf.GGML_QUANT_SIZES[own][0]
        if tensor.ndim < 2 or array.shape[-1] % block or "gate.weight" in name:
            writer.add_tensor(full, array)
        elif own in SCALES:
            writer.add_tensor(full, small_blocks(own, array.shape), raw_dtype=own)
        else:
            writer.add_tensor(full, gguf.quants.quantize(array, own), raw_dtype=own)
    return finished(writer, path)


def copied(
    path: Path, to: Path, changes: Mapping[str, Any] = {}, more: Mapping[str, np.ndarray] = {}
) -> Path:
    """Write a file anew, its tensors in float32 and `more` of them, with other metadata; None
    leaves a field out."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in {"general.architecture", *changes}:
            writer.add_key_value(key, field.contents(), field.types[0])
    adders = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    for key, value in changes.items():
        if value is not None:
            adders[type(value)](key, value)
    plain = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
             for tensor in reader.tensors}  # fmt: skip
    for name, array in (plain | dict(more)).items():
        writer.add_tensor(name, array)
    return finished(writer, to)


def finished(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], arch: str) -> None:
    """The fields of config.json under GGUF's names."""
    heads, latent = config["num_attention_heads"], arch == "deepseek2"
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if latent else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("sliding_window") and config["model_type"] in ("mistral", "mixtral"):
        writer.add_sliding_window(config["sliding_window"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for field, add in {
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "n_routed_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
    }.items():
        if config.get(field) is not None:
            add(config[field])
    if not latent:
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        return
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotated)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(bool(config["norm_topk_prob"]))
    writer.add_expert_group_count(config.get("n_group") or 1)
    writer.add_expert_group_used_count(config.get("topk_group") or 1)
    sigmoid = config["model_type"] == "deepseek_v3"
    writer.add_expert_gating_func(
        gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX
    )
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of q and k in the architecture "llama"."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def renamed(folder: Path, config: dict[str, Any], arch: str) -> dict[str, torch.Tensor]:
    """The tensors in GGUF's arrangement, under names that the gguf package's table knows."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if "experts" in parts:
            at = parts.index("experts")
            kind = EXPERTS.get(parts[at + 2], parts[at + 2])
            stack = f"model.layers.{parts[2]}.mlp.experts.{kind}.weight"
            stacks.setdefault(stack, {})[int(parts[at + 1])] = tensor
        elif parts[-2] == "kv_b_proj":
            split = tensor.view(config["num_attention_heads"], -1, tensor.shape[-1]).split(
                (config["qk_nope_head_dim"], config["v_head_dim"]), dim=1
            )
            found[name.replace("kv_b", "k_b")] = split[0].transpose(1, 2).contiguous()
            found[name.replace("kv_b", "v_b")] = split[1].contiguous()
        elif arch == "llama" and parts[-2] in heads:
            found[name] = permute(tensor, heads[parts[-2]])
        else:
            key = "mlp.gate.e_score_correction.bias"
            found[name.replace("mlp.gate.e_score_correction_bias", key)] = tensor
    for name, stack in stacks.items():
        found[name] = torch.stack([stack[i] for i in range(len(stack))])
    return found


def small_blocks(kind: Type, shape: tuple[int, ...]) -> np.ndarray:
    """Random K blocks for a matrix of this shape, with weights below about 0.5."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    found = random_blocks(size, shape[0], shape[1] // weights)
    places, unit = SCALES[kind]
    for at in places:
        scales = np.full(found.shape[:2], unit * 1e-3, np.float16)
        found[..., at : at + 2] = scales[..., None].view(np.uint8)
    return found.reshape(shape[0], -1)


def random_blocks(bytes_per_block: int, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Random bytes [rows, blocks, bytes]; every pattern is a valid block."""
    draw = np.random.default_rng(seed)
    return draw.integers(0, 256, (rows, blocks, bytes_per_block), dtype=np.uint8)
