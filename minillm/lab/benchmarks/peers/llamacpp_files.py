"""Writes a Hugging Face folder as a GGUF file, and has llama.cpp quantise it.

For the plain decoders of `checkpoint.py`, without a tokenizer. It needs gguf and numpy, but neither
torch nor safetensors.
"""

import ctypes
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

ARCHITECTURES = MappingProxyType(
    {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
)
NUMPY = MappingProxyType({"BF16": "<u2", "F16": "<f2", "F32": "<f4"})  # bf16 as its bits
Array = Any


def gguf_file(model: Path, kind: str | None, cache: Path) -> tuple[Path, bool]:
    """The GGUF file of a folder, quantised as `kind` or as it is, and whether this call made it."""
    stamp = (model / "config.json").stat().st_mtime_ns
    plain = cache / "llamacpp" / f"{model.resolve().name}-{stamp:x}.gguf"
    wanted = plain if kind is None else plain.with_suffix(f".{kind}.gguf")
    if wanted.exists():
        return wanted, False
    plain.parent.mkdir(parents=True, exist_ok=True)
    part = wanted.with_suffix(f".{os.getpid()}")
    if not plain.exists():
        write(model, part)
        part.rename(plain)
    if kind is not None:
        quantise(plain, part, kind)
        part.rename(wanted)
    return wanted, True


def quantise(source: Path, target: Path, kind: str) -> None:
    """Quantise a file with llama.cpp's own mixture of types."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    paths = str(source).encode(), str(target).encode()
    if code := llama_cpp.llama_model_quantize(*paths, ctypes.byref(settings)):
        raise RuntimeError(f"llama.cpp could not quantise {source} to {kind} (code {code}).")


def write(model: Path, path: Path) -> None:
    """Write a folder as a GGUF file. Matrices keep their type; norms and biases are float32."""
    import gguf

    config = json.loads((model / "config.json").read_text("utf-8"))
    family = config["model_type"]
    if family not in ARCHITECTURES:
        raise ValueError(f"{family} is not one of {', '.join(ARCHITECTURES)}.")
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family])
    writer.add_tokenizer_model("none")
    add_metadata(writer, config)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == writer.arch)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    types = gguf.GGMLQuantizationType
    for file in sorted(model.glob("*.safetensors")):
        for name, dtype, values in tensors(file):
            short, _, suffix = name.rpartition(".")
            target = f"{names.get_name(short)}.{suffix}"
            if values.ndim == 1:
                writer.add_tensor(target, as_float32(values, dtype))
                continue
            if writer.arch == "llama":
                values = as_ggml_rotates(short, values, config)
            writer.add_tensor(target, values.view("u1"), raw_dtype=types[dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: Any, config: dict[str, Any]) -> None:
    """The fields of config.json under GGUF's names."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config.get("rope_parameters", config)["rope_theta"]))
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)


def tensors(file: Path) -> Iterator[tuple[str, str, Array]]:
    """Name, type and values of each tensor of a safetensors file; values are memory-mapped."""
    import numpy

    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    for name, each in header.items():
        if name == "__metadata__":
            continue
        begin, end = each["data_offsets"]
        dtype = numpy.dtype(NUMPY[each["dtype"]])
        count = (end - begin) // dtype.itemsize
        flat = numpy.memmap(file, dtype, "r", 8 + size + begin, (count,))
        yield name, each["dtype"], flat.reshape(each["shape"])


def as_float32(values: Array, dtype: str) -> Array:
    """A vector in float32."""
    if dtype != "BF16":
        return values.astype("<f4")
    return (values.astype("<u4") << 16).view("<f4")


def as_ggml_rotates(name: str, values: Array, config: dict[str, Any]) -> Array:
    """Rows of q and k in the order of the architecture "llama": ggml rotates neighbours."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    count = heads.get(name.rpartition(".")[2])
    if count is None:
        return values
    split = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2)
    return split.reshape(values.shape).copy()
