"""Writes a checkpoint as one GGUF file, tensor by tensor. The inverse of `models/gguf.py`.

Matrices have the chosen type; norms, biases and routers are F32, as in llama.cpp. With 4 or 5 bits
the output matrix (or a tied embedding) is Q8_0: it decides about small models' quality. A matrix
whose rows are no multiple of 32 is F16.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from tqdm import tqdm

from minillm.errors import ConfigError, did_you_mean
from minillm.gguf.container import SUFFIX, is_gguf
from minillm.gguf.names import INSIDE, MIXTRAL, OUTSIDE
from minillm.gguf.types import TYPES
from minillm.lab.quantise.gguf_encode import BLOCK, ENCODERS, encoded
from minillm.lab.quantise.gguf_metadata import (
    ARCHITECTURES,
    FILE_TYPES,
    check_writable,
    frequency_factors,
    metadata,
    tokenizer_fields,
)
from minillm.lab.quantise.gguf_writing import NUMBERS, NewTensor, write_gguf
from minillm.layers.linear_methods import TensorSlice
from minillm.models.checkpoint import ModelSource, read_tensors, shard_headers, weight_files
from minillm.models.decoder import Decoder
from minillm.models.loader import COMPUTED, LAYER, check_tensors

TO_GGUF: Mapping[str, str] = MappingProxyType(
    {theirs: ours for ours, theirs in (*INSIDE.items(), *MIXTRAL.items()) if ours != "attn_v_b"}
)
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


@dataclass
class Planned:
    """A tensor of the file, and the checkpoint tensors that it consists of: one, or one per
    expert. `heads`: number of heads whose rows change their order."""

    tensor: NewTensor
    sources: list[str] = field(default_factory=list)
    heads: int = 0


@dataclass(frozen=True)
class GGUFReport:
    """A finished file: bytes by tensor type."""

    path: Path
    num_bytes: int
    source_bytes: int
    types: Mapping[str, int]


def write_model(
    source: ModelSource, path: Path, kind: str, has_tokenizer: bool = True
) -> GGUFReport:
    """Write the checkpoint of `source` with matrices of type `kind`, a key of FILE_TYPES.

    Memory: one tensor; of a mixture of experts, one matrix of all experts of a layer. Raises
    ConfigError, CheckpointError or UnsupportedFeatureError.
    """
    if kind not in FILE_TYPES:
        raise ConfigError(
            f"There is no type {kind!r} to write; choose {', '.join(FILE_TYPES)}."
            f"{did_you_mean(kind, FILE_TYPES)}"
        )
    if path.suffix != SUFFIX:
        raise ConfigError(f"--out is {path}; the name of a GGUF file ends with {SUFFIX}.")
    if source.folder is None:
        raise ConfigError(f"{source.name} is a shape without weights; there is nothing to write.")
    if source.quantization or is_gguf(source.folder):
        raise ConfigError(
            f"{source.name} is quantised or a GGUF file already; give the original checkpoint."
        )
    check_writable(source.config, len(source.eos_token_ids))
    files = weight_files(source)
    plan, factors = planned(source, files, kind), frequency_factors(source.config)
    folder = source.folder if has_tokenizer else None
    fields = metadata(source, kind) | tokenizer_fields(folder, source.config.vocab_size)
    tensors = [each.tensor for each in plan]
    if factors is not None:
        rope = NewTensor("rope_freqs.weight", tuple(factors.shape), TYPES[NUMBERS["F32"]])
        tensors.append(rope)
    write_gguf(path, fields, tensors, contents(plan, files, factors))
    types: Counter[str] = Counter()
    for tensor in tensors:
        types[tensor.type.name] += tensor.num_bytes
    before = sum(file.stat().st_size for file in files)
    return GGUFReport(path, path.stat().st_size, before, types)


def planned(source: ModelSource, files: list[Path], kind: str) -> list[Planned]:
    """The tensors of the file, after a check that the checkpoint fits the model."""
    headers = [(path, name, each) for path in files for name, each in shard_headers(path).items()]
    config = source.config
    check_tensors(source, Decoder(config, device="meta").checkpoint_tensors(), headers)
    permuted = ARCHITECTURES[config.family] == "llama"
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if permuted else {}
    plan: dict[str, Planned] = {}
    for _, name, header in headers:
        shape = header.shape
        layer = LAYER.match(name)
        late = layer is not None and int(layer[1]) >= config.num_layers  # token prediction
        if (
            COMPUTED.fullmatch(name)
            or late
            or (name == "lm_head.weight" and config.tie_word_embeddings)
        ):
            continue
        stem, number = gguf_name(name)
        if number is not None:
            shape = (config.moe.num_experts if config.moe else 0, *shape)
        type_name = chosen_type(stem, shape, kind, config.tie_word_embeddings)
        tensor = NewTensor(stem, shape, TYPES[NUMBERS[type_name]])
        each = plan.setdefault(stem, Planned(tensor))
        each.heads = heads.get(stem.split(".")[-2], 0)
        each.sources.append(name)
    for each in plan.values():
        each.sources.sort(key=lambda name: gguf_name(name)[1] or 0)
    return list(plan.values())


def gguf_name(name: str) -> tuple[str, int | None]:
    """A checkpoint tensor's name in the file, and the number of its expert."""
    module, _, suffix = name.rpartition(".")
    for ours, theirs in OUTSIDE.items():
        if module == theirs:
            return f"{ours}.{suffix}", None
    _, _, index, rest = module.split(".", 3)
    expert = EXPERT.fullmatch(rest)
    pattern = f"{expert[1]}{{}}{expert[3]}" if expert else rest
    return f"blk.{index}.{TO_GGUF[pattern]}.{suffix}", int(expert[2]) if expert else None


def chosen_type(name: str, shape: tuple[int, ...], kind: str, tied: bool) -> str:
    """The type of a tensor."""
    if len(shape) == 1 or "ffn_gate_inp" in name:
        return "F32"
    if kind not in ENCODERS:
        return kind
    if shape[-1] % BLOCK:
        return "F16"
    return "Q8_0" if name == ("token_embd.weight" if tied else "output.weight") else kind


def contents(plan: list[Planned], files: list[Path], factors: Tensor | None) -> Iterator[bytes]:
    """The bytes of all tensors."""
    place = {name: path for path in files for name in shard_headers(path)}
    total = sum(each.tensor.num_bytes for each in plan)
    with tqdm(total=total, desc="Writing", unit="B", unit_scale=True, delay=2) as progress:
        for each in plan:
            wanted = {name: each.tensor.shape[-2:] for name in each.sources}
            found: dict[str, Tensor] = {}
            for path in dict.fromkeys(place[name] for name in each.sources):
                slices = {k: TensorSlice.whole(shape) for k, shape in wanted.items()}
                found |= read_tensors(path, slices)
            parts = [rotary_order(found[name], each.heads) for name in each.sources]
            values = torch.stack(parts) if len(each.tensor.shape) == 3 else parts[0]
            yield encoded(each.sources[0], values, each.tensor.type.name)
            progress.update(each.tensor.num_bytes)
    if factors is not None:
        yield encoded("rope_freqs.weight", factors, "F32")


def rotary_order(values: Tensor, heads: int) -> Tensor:
    """Rows 0, D/2, 1, D/2 + 1, ... of each head, or all rows as they are (no heads)."""
    if not heads:
        return values
    return values.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
