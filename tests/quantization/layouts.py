"""Layouts of quantised checkpoints, written and read with numpy only.

Each layout makes a matrix [out, in] from random codes, so it needs no packing of its own, and gives
its values. `values_of` reads the same layouts from the tensors of a folder. Both follow the public
descriptions of the formats, and share no code with the readers and writers of the engine.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Arrays = dict[str, np.ndarray]
STD = 0.15  # of the random weights
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column AWQ_NIBBLES[i]
NF4 = np.array([
    -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803,
    0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
], np.float32)  # fmt: skip
STATE = "weight.quant_state.bitsandbytes__"


def e4m3() -> np.ndarray:
    """The value of each of the 256 bytes."""
    byte = np.arange(256)
    sign, exponent, mantissa = 1 - 2 * (byte >> 7), (byte >> 3) & 15, byte & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    found = sign * np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    return np.where((byte & 127) == 127, np.nan, found).astype(np.float32)


def nibbles(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [.., n] -> int64 [.., n, 32 / bits], the lowest bits first."""
    unsigned = words.view(np.uint32).astype(np.int64)[..., None]
    return (unsigned >> np.arange(0, 32, bits)) & ((1 << bits) - 1)


def along_rows(words: np.ndarray, bits: int) -> np.ndarray:
    """Words along the last side -> codes along it."""
    return nibbles(words, bits).reshape(*words.shape[:-1], -1)


def along_columns(words: np.ndarray, bits: int) -> np.ndarray:
    """Words along the first of two sides -> codes along it."""
    return along_rows(words.T.copy(), bits).T


def awq_codes(words: np.ndarray) -> np.ndarray:
    """[n, out / 8] -> [n, out]"""
    stored = nibbles(words, 4)
    found = np.empty_like(stored)
    found[..., list(AWQ_NIBBLES)] = stored
    return found.reshape(len(words), -1)


def repeated(
    scales: np.ndarray, shape: tuple[int, int], block: tuple[int, int] | None
) -> np.ndarray:
    """Scales of one, of rows, of groups or of blocks -> a scale for each weight. Only blocks may be
    incomplete at the edges."""
    scales = scales.reshape(1, 1) if scales.size == 1 else scales.reshape(len(scales), -1)
    if block is None or scales.shape == (shape[0], 1):
        block = shape[0] // scales.shape[0], shape[1] // scales.shape[1]
    rows, columns = np.indices(shape, sparse=True)
    return scales[rows // block[0], columns // block[1]]


def values_of(
    found: Mapping[str, np.ndarray],
    bits: int = 4,
    version: int = 1,
    block: tuple[int, int] | None = None,
) -> np.ndarray:
    """The values [out, in] of a matrix from its tensors, by their suffixes. `bits` and `version`
    are those of GPTQ, `block` has the sides of a block of FP8."""
    if "qweight" in found and "g_idx" in found:
        return gptq_values(found, bits, version)
    if "qweight" in found:
        codes, zeros = awq_codes(found["qweight"]), awq_codes(found["qzeros"])
        group = np.arange(len(codes)) // (len(codes) // len(zeros))
        return ((codes - zeros[group]) * found["scales"].astype(np.float32)[group]).T
    if "weight_packed" in found:
        return packed_values(found)
    if "weight.absmax" in found:
        return four_bit_values(found)
    codes = found["weight"]
    if "SCB" in found:
        return codes * found["SCB"][:, None] / np.float32(127)
    numbers = e4m3()[codes] if codes.dtype == np.uint8 else codes.astype(np.float32)
    name = "weight_scale_inv" if "weight_scale_inv" in found else "weight_scale"
    if "weight_zero_point" in found:
        zeros = found["weight_zero_point"].astype(np.float32)
        numbers = numbers - repeated(zeros, numbers.shape, block)
    return numbers * repeated(found[name].astype(np.float32), numbers.shape, block)


def gptq_values(found: Mapping[str, np.ndarray], bits: int, version: int) -> np.ndarray:
    """scales[g_idx[i], o] (q[i, o] - zero[g_idx[i], o])"""
    codes, zeros = along_columns(found["qweight"], bits), along_rows(found["qzeros"], bits)
    zeros = (zeros + (version == 1)) & ((1 << bits) - 1)
    group = found["g_idx"]
    return ((codes - zeros[group]) * found["scales"].astype(np.float32)[group]).T


def packed_values(found: Mapping[str, np.ndarray]) -> np.ndarray:
    """compressed-tensors, pack-quantized."""
    out, width = found["weight_shape"]
    bits = 32 * found["weight_packed"].shape[1] // width
    codes = along_rows(found["weight_packed"], bits)[:, :width]
    scales = found["weight_scale"].astype(np.float32)
    zeros = np.full(scales.shape, 1 << (bits - 1))
    if "weight_zero_point" in found:
        zeros = along_columns(found["weight_zero_point"], bits)[:out]
    group = np.arange(width) // (width // scales.shape[1])
    group = found.get("weight_g_idx", group)
    return (codes - zeros[:, group]) * scales[:, group]


def four_bit_values(found: Mapping[str, np.ndarray]) -> np.ndarray:
    """bitsandbytes: blocks through the flattened matrix, the first code in the high half."""
    name = next(each for each in found if each.startswith(STATE))
    state = json.loads(found[name].tobytes())
    absmax, packed = found["weight.absmax"], found["weight"].flatten()
    if absmax.dtype == np.uint8:
        nested = np.arange(len(absmax)) // state["nested_blocksize"]
        levels = found["weight.nested_quant_map"][absmax]
        offset = np.float32(state["nested_offset"])
        absmax = levels * found["weight.nested_absmax"][nested] + offset
    codes = np.stack((packed >> 4, packed & 15), -1).flatten()
    block = np.arange(len(codes)) // state["blocksize"]
    return (found["weight.quant_map"][codes] * absmax[block]).reshape(state["shape"])


# ---- random matrices of each layout --------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Random matrices of a layout: `make(dice, out, in)`, and `quantization_config` of config.json.

    The other fields are those of `values_of`.
    """

    make: Callable[[np.random.Generator, int, int], Arrays]
    settings: dict[str, Any]
    bits: int = 4
    version: int = 1
    block: tuple[int, int] | None = None

    def values(self, found: Mapping[str, np.ndarray]) -> np.ndarray:
        """[out, in]"""
        found = values_of(found, self.bits, self.version, self.block)
        return found.astype(np.float32)


def words(dice: np.random.Generator, *shape: int) -> np.ndarray:
    """Random int32."""
    return dice.integers(-(1 << 31), 1 << 31, shape, dtype=np.int64).astype(np.int32)


def scales(dice: np.random.Generator, std: float, *shape: int) -> np.ndarray:
    """Positive scales with which codes of this standard deviation have that of weights."""
    return (dice.uniform(0.8, 1.2, shape) * STD / std).astype(np.float32)


def gptq(
    bits: int = 4, group: int = 0, order: bool = False, symmetric: bool = False, version: int = 1
) -> Layout:
    """GPTQ with 4-bit or 8-bit codes; `group` 0: whole rows."""

    def make(dice: np.random.Generator, out: int, width: int) -> Arrays:
        size = group or width
        index = np.arange(width, dtype=np.int32) // size
        step = 32 // bits
        half, mask = 1 << (bits - 1), 0x11111111 if bits == 4 else 0x01010101
        zero = np.full((width // size, out // step), mask * (half - (version == 1)), np.uint32)
        if not symmetric:  # around the middle, so that weights have a mean of 0
            shift = dice.integers(0, 2, zero.shape).astype(np.uint32)
            zero = zero - shift * np.uint32(mask)
        return {
            "qweight": words(dice, width // step, out),
            "qzeros": zero.view(np.int32),
            "scales": scales(dice, (1 << bits) / 12**0.5, width // size, out).astype(np.float16),
            "g_idx": dice.permutation(index) if order else index,
        }

    settings = {
        "quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": symmetric,
        "desc_act": order, "checkpoint_format": "gptq_v2" if version == 2 else "gptq",
    }  # fmt: skip
    return Layout(make, settings, bits, version)


def awq(group: int) -> Layout:
    """AWQ's "GEMM" version."""

    def make(dice: np.random.Generator, out: int, width: int) -> Arrays:
        return {
            "qweight": words(dice, width, out // 8),
            "qzeros": words(dice, width // group, out // 8),
            "scales": scales(dice, 6.5, width // group, out).astype(np.float16),
        }

    settings = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True,
                "version": "gemm", "modules_to_not_convert": ["gate"]}  # fmt: skip
    return Layout(make, settings)


def packed(bits: int, group: int, symmetric: bool = True, order: bool = False) -> Layout:
    """compressed-tensors, pack-quantized."""

    def make(dice: np.random.Generator, out: int, width: int) -> Arrays:
        step, count = 32 // bits, width // group
        found = {
            "weight_packed": words(dice, out, -(-width // step)),
            "weight_scale": scales(dice, (1 << bits) / 12**0.5, out, count),
            "weight_shape": np.array([out, width]),
        }
        if not symmetric:
            found["weight_zero_point"] = words(dice, -(-out // step), count)
        if order:
            index = np.arange(width, dtype=np.int32) // group
            found["weight_g_idx"] = dice.permutation(index)
        return found

    return Layout(make, compressed("pack-quantized", num_bits=bits, group_size=group))


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "format": kind}
    return {"quant_method": "compressed-tensors", "format": kind, "ignore": ["re:.*mlp.gate$"],
            "config_groups": {"group_0": group}}  # fmt: skip


def float8(dice: np.random.Generator, out: int, width: int) -> np.ndarray:
    """The bytes of normal numbers times 100, whose standard deviation is about 100."""
    numbers = torch.tensor(dice.standard_normal((out, width)) * 100).clamp(-448, 448)
    return numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def fp8(name: str, sides: tuple[int, int] | str, settings: Mapping[str, Any]) -> Layout:
    """e4m3 with scales for blocks of `sides`, "rows" or one "matrix"."""

    def make(dice: np.random.Generator, out: int, width: int) -> Arrays:
        shape: tuple[int, ...] = (out, 1) if sides == "rows" else ()
        if isinstance(sides, tuple):
            shape = -(-out // sides[0]), -(-width // sides[1])
        return {"weight": float8(dice, out, width), name: scales(dice, 100, *shape)}

    return Layout(make, dict(settings), block=sides if isinstance(sides, tuple) else None)


def int8(name: str, group: int | None, zeros: bool, settings: Mapping[str, Any]) -> Layout:
    """8-bit codes with scales of rows or groups."""

    def make(dice: np.random.Generator, out: int, width: int) -> Arrays:
        count = width // group if group else 1
        found = {"weight": dice.integers(-127, 128, (out, width)).astype(np.int8)}
        if name == "SCB":
            row = scales(dice, 73 / 127, out)
            return found | {name: row, "weight_format": np.zeros((), np.uint8)}
        found[name] = scales(dice, 73, out, count)
        if zeros:
            found["weight_zero_point"] = dice.integers(-9, 9, (out, count)).astype(np.int8)
        return found

    return Layout(make, dict(settings))


def four_bits(kind: str, double: bool) -> Layout:
    """bitsandbytes in blocks of 64."""
    table = NF4 if kind == "nf4" else np.array(
        [0, 0.0052083, 0.6666667, 1, 0.3333333, 0.5, 0.1666667, 0.25], np.float32)  # fmt: skip
    table = table if kind == "nf4" else np.concatenate((table, -table))

    def make(dice: np.random.Generator, out: int, width: int) -> Arrays:
        count = -(-out * width // 64)
        state: dict[str, Any] = {
            "quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": [out, width]
        }  # fmt: skip
        found = {
            "weight": dice.integers(0, 256, (-(-out * width // 2), 1)).astype(np.uint8),
            "weight.absmax": scales(dice, 0.5, count),
            "weight.quant_map": table,
        }
        if double:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.31}
            found["weight.absmax"] = dice.integers(0, 256, count).astype(np.uint8)
            found["weight.nested_absmax"] = scales(dice, 1.5, -(-count // 256))
            found["weight.nested_quant_map"] = np.linspace(-1, 1, 256, dtype=np.float32)
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        return found | {f"{STATE}{kind}": text}

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
                "bnb_4bit_use_double_quant": double, "llm_int8_skip_modules": ["gate"]}  # fmt: skip
    return Layout(make, settings)


BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
LAYOUTS: dict[str, Layout] = {
    "gptq": gptq(group=32),
    "gptq, act order": gptq(group=32, order=True),
    "gptq, symmetric": gptq(group=16, symmetric=True),
    "gptq, version 2": gptq(group=32, version=2),
    "gptq, 8 bits": gptq(bits=8),
    "gptq, groups of 8": gptq(group=8),
    "awq": awq(32),
    "packed": packed(4, 32),
    "packed, zero points": packed(4, 32, symmetric=False),
    "packed, act order": packed(4, 32, order=True),
    "packed, 8 bits": packed(8, 16),
    "int8 rows": int8("weight_scale", None, False, compressed("int-quantized", num_bits=8)),
    "int8 groups": int8("weight_scale", 32, True, compressed("int-quantized", num_bits=8)),
    "llm.int8": int8("SCB", None, False, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "nf4": four_bits("nf4", False),
    "nf4, double": four_bits("nf4", True),
    "fp4": four_bits("fp4", False),
    "fp8 blocks": fp8(
        "weight_scale_inv", (128, 128), BLOCK_FP8 | {"weight_block_size": [128, 128]}),
    "fp8 small blocks": fp8(
        "weight_scale_inv", (32, 48), BLOCK_FP8 | {"weight_block_size": [32, 48]}),
    "fp8 matrix": fp8("weight_scale", "matrix", BLOCK_FP8 | {"activation_scheme": "static"}),
    "float rows": fp8("weight_scale", "rows", compressed("float-quantized", num_bits=8)),
    "float blocks": fp8(
        "weight_scale", (128, 128),
        compressed("float-quantized", num_bits=8, block_structure=[128, 128])),
}  # fmt: skip


def as_tensor(array: np.ndarray, is_float8: bool = False) -> Tensor:
    """A tensor of the same bytes."""
    found = torch.from_numpy(np.ascontiguousarray(array).copy())
    return found.view(torch.float8_e4m3fn) if is_float8 else found


def as_array(tensor: Tensor) -> np.ndarray:
    """An array of the same bytes; FP8 as uint8, bfloat16 as float32."""
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
