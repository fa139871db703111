"""The tensors of a GGUF file under the names that the loader expects.

A plain tensor is "name.weight". A quantised matrix is its blocks: "name.q4_k", uint8
[out, blocks, bytes of a block]. Only the pages of the rows and blocks that are wanted are read.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from minillm.errors import CheckpointError
from minillm.gguf.container import GGUFFile, TensorInfo, open_gguf
from minillm.gguf.names import Place, places
from minillm.layers.linear_methods import TensorSlice
from minillm.quantization.formats import Header
from minillm.quantization.gguf.blocks import DECODERS

PLAIN_TYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def gguf_headers(path: Path) -> dict[str, Header]:
    """Shape and dtype of every tensor of the model in a file."""
    file = open_gguf(path)
    return {
        stored_name(name, place): Header(stored_shape(file, place), stored_dtype(place))
        for name, place in places(file).items()
    }


def read_gguf(path: Path, slices: Mapping[str, TensorSlice]) -> Iterator[tuple[str, Tensor]]:
    """Read the given slices of a file's tensors, one at a time."""
    file = open_gguf(path)
    for name, place in places(file).items():
        wanted = slices.get(stored_name(name, place))
        if wanted is not None:
            yield stored_name(name, place), read(file, place, wanted)


def stored_name(name: str, place: Place) -> str:
    """The name of a tensor; blocks have their type instead of "weight"."""
    if place.keys is not None or place.tensor.type.is_plain:
        return name
    return f"{name.removesuffix('.weight')}.{place.tensor.type.name.lower()}"


def stored_dtype(place: Place) -> torch.dtype:
    """The dtype of a tensor: that of plain numbers, uint8 for blocks, float32 for MLA's pair."""
    if place.keys is not None:
        return torch.float32
    return PLAIN_TYPES.get(place.tensor.type.name, torch.uint8)


def stored_shape(file: GGUFFile, place: Place) -> tuple[int, ...]:
    """The shape of a tensor."""
    if place.keys is not None:
        (heads, rank, keys), values = matrices(file, place.keys), matrices(file, place.tensor)
        if (heads, rank) != values[::2]:
            raise CheckpointError(
                f"{file.path} has {place.keys.name} of shape {list(place.keys.shape)}, which does "
                f"not fit {place.tensor.name} of shape {list(place.tensor.shape)}."
            )
        return heads * (keys + values[1]), rank
    shape = in_blocks(place.tensor)
    return shape if place.expert is None else shape[1:]


def matrices(file: GGUFFile, info: TensorInfo) -> tuple[int, int, int]:
    """The shape of a tensor that has one matrix per head."""
    if len(info.shape) != 3:
        raise CheckpointError(
            f"{file.path} has {info.name} of shape {list(info.shape)}; three dimensions are "
            "expected."
        )
    return info.shape[0], info.shape[1], info.shape[2]


def in_blocks(info: TensorInfo) -> tuple[int, ...]:
    """The shape of a tensor; blocks instead of the columns of a quantised one."""
    if info.type.is_plain:
        return info.shape
    return (*info.shape[:-1], info.shape[-1] // info.type.weights, info.type.bytes)


def mapped(file: GGUFFile, info: TensorInfo) -> Tensor:
    """The whole tensor, over the memory-mapped file."""
    dtype = PLAIN_TYPES.get(info.type.name, torch.uint8)
    shape = in_blocks(info)
    if info.start % dtype.itemsize == 0:
        flat = torch.frombuffer(file.data, dtype=dtype, count=math.prod(shape), offset=info.start)
    else:  # a file may have an alignment of 1
        raw = torch.frombuffer(
            file.data, dtype=torch.uint8, count=info.num_bytes, offset=info.start
        )
        flat = raw.clone().view(dtype)
    return flat.view(shape)


def read(file: GGUFFile, place: Place, wanted: TensorSlice) -> Tensor:
    """The wanted part of a tensor, in memory of its own."""
    if place.keys is not None:
        return key_value_matrix(file, place.keys, place.tensor)[wanted.index].contiguous()
    whole = mapped(file, place.tensor)
    if place.expert is not None:
        whole = whole[place.expert]
    if place.rotated_heads:
        rows = rotary_rows(len(whole), place, file)[wanted.index[0]]
        return whole[rows][(slice(None), *wanted.index[1:])].contiguous()
    return whole[wanted.index].clone()


def rotary_rows(num_rows: int, place: Place, file: GGUFFile) -> Tensor:
    """The row in the file of each row of the model.

    ggml rotates rows 2i and 2i + 1 of a head of architecture "llama" as a pair, and Hugging Face
    rows i and i + D/2. So the file has the rows of each head in the order 0, D/2, 1, D/2 + 1, ...
    """
    heads = place.rotated_heads
    if num_rows % (2 * heads):
        raise CheckpointError(
            f"{file.path} has {place.tensor.name} with {num_rows} rows, which {heads} heads of an "
            "even size cannot share."
        )
    rows = torch.arange(num_rows).view(heads, -1, 2)  # [H, D / 2, 2]
    return rows.transpose(1, 2).reshape(-1)


def key_value_matrix(file: GGUFFile, keys: TensorInfo, values: TensorInfo) -> Tensor:
    """MLA's `kv_b_proj`, float32 [H x (Dn + Dv), R], of W_uk [H, R, Dn] and W_uv [H, Dv, R]."""
    both = dense(file, keys).transpose(1, 2), dense(file, values)
    return torch.cat(both, dim=1).flatten(0, 1)


def dense(file: GGUFFile, info: TensorInfo) -> Tensor:
    """A whole tensor in float32."""
    stored = mapped(file, info)
    if info.type.is_plain:
        return stored.float()
    return DECODERS[info.type.name](stored.flatten(0, -3)).dense().view(info.shape)
