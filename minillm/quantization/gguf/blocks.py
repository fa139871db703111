"""Decodes GGUF's blocks into codes, scales and offsets, without rounding.

A matrix is uint8 [out, blocks, bytes of a block]. The formulas are those of ggml's
`dequantize_row_*`; element j of a block of 32 is in the low half of byte j, element j + 16 in the
high half. In K blocks of 256 weights, groups of 16 or 32 have small integer scales, which are
multiplied by the block's float16 scale d (and minima by dmin) in float32, as ggml does.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from minillm.quantization.quantized import Quantized, integer_codes


def floats(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, [out, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def halves(packed: Tensor) -> Tensor:
    """uint8 [.., n] -> [.., 2 n]: all low halves, then all high halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def bit_planes(packed: Tensor, bits: int) -> Tensor:
    """uint8 [.., n] -> [.., n x 8 / bits]: the lowest bits of all bytes, then the next."""
    shifts = range(0, 8, bits)
    return torch.cat([(packed >> shift) & ((1 << bits) - 1) for shift in shifts], dim=-1)


def fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Bit j of the 32-bit word at byte `start` for element j, [out, blocks, 32]."""
    word = blocks[..., start : start + 4]  # little-endian: bit j is in byte j // 8
    spread = word.repeat_interleave(8, dim=-1) >> torch.arange(8, dtype=torch.uint8).repeat(4)
    return spread & 1


def four_bits(
    codes: Tensor, scales: Tensor, zeros: Tensor | None = None, minima: Tensor | None = None
) -> Quantized:
    """Codes 0 to 15 [out, blocks, n] and scales [out, blocks x groups of a block]."""
    return Quantized(integer_codes(codes.flatten(1), 4), scales, zeros, minima)


def eight_bits(codes: Tensor, scales: Tensor, minima: Tensor | None = None) -> Quantized:
    """Signed codes of up to 8 bits."""
    return Quantized(integer_codes(codes.flatten(1), 8), scales, None, minima)


def q4_0(blocks: Tensor) -> Quantized:
    """d (q - 8)"""
    d = floats(blocks, 0)
    return four_bits(halves(blocks[..., 2:]), d, torch.full_like(d, 8, dtype=torch.int8))


def q4_1(blocks: Tensor) -> Quantized:
    """d q + m"""
    return four_bits(halves(blocks[..., 4:]), floats(blocks, 0), minima=floats(blocks, 2))


def q5_0(blocks: Tensor) -> Quantized:
    """d (q - 16)"""
    codes = halves(blocks[..., 6:]) | fifth_bits(blocks, 2) << 4
    return eight_bits(codes.to(torch.int8) - 16, floats(blocks, 0))


def q5_1(blocks: Tensor) -> Quantized:
    """d q + m"""
    codes = halves(blocks[..., 8:]) | fifth_bits(blocks, 4) << 4
    return eight_bits(codes, floats(blocks, 0), floats(blocks, 2))


def q8_0(blocks: Tensor) -> Quantized:
    """d q"""
    return eight_bits(blocks[..., 2:].contiguous().view(torch.int8), floats(blocks, 0))


def scaled(d: Tensor, small: Tensor) -> Tensor:
    """d [out, blocks] times the groups' integers [out, blocks, groups], float32 [out, all]."""
    return (d.float()[..., None] * small.float()).flatten(1)


def q2_k(blocks: Tensor) -> Quantized:
    """d sc q - dmin m, groups of 16: 16 bytes of sc and m (4 bits each), 64 of q, d, dmin"""
    small = blocks[..., :16]
    quants = blocks[..., 16:80].unflatten(-1, (2, 32))
    scales = scaled(floats(blocks, 80), small & 15)
    minima = scaled(floats(blocks, 82), small >> 4)
    return four_bits(bit_planes(quants, 2).flatten(-2), scales, minima=-minima)


def q3_k(blocks: Tensor) -> Quantized:
    """d (sc - 32)(q - 4), groups of 16: 32 bytes of third bits, 64 of low bits, 12 of sc, d"""
    third = bit_planes(blocks[..., :32], 1)  # [out, blocks, 256]
    low = bit_planes(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-2)
    packed = blocks[..., 96:108]
    small = halves(packed[..., :8]) | bit_planes(packed[..., 8:], 2) << 4
    scales = scaled(floats(blocks, 108), small.to(torch.int8) - 32)
    return four_bits(low | third << 2, scales, torch.full_like(scales, 4, dtype=torch.int8))


def scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes -> 8 scales and 8 minima of 6 bits each.

    Bytes 0 to 3 and 4 to 7 have the first four of each in their low 6 bits. Bytes 8 to 11 have the
    low 4 bits of the last four, whose upper 2 bits are at the top of the first 8 bytes.
    """
    first, second, third = packed.split(4, dim=-1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return scales, minima


def q4_k(blocks: Tensor) -> Quantized:
    """d sc q - dmin m, groups of 32: d, dmin, 12 bytes of sc and m, 128 of q"""
    small, low = scales_and_minima(blocks[..., 4:16])
    codes = halves(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-2)
    scales, minima = scaled(floats(blocks, 0), small), scaled(floats(blocks, 2), low)
    return four_bits(codes, scales, minima=-minima)


def q5_k(blocks: Tensor) -> Quantized:
    """As Q4_K, with 32 bytes of fifth bits before the low ones: bit g of byte j is that of element
    32 g + j"""
    small, low = scales_and_minima(blocks[..., 4:16])
    codes = halves(blocks[..., 48:].unflatten(-1, (4, 32))).flatten(-2)
    codes |= bit_planes(blocks[..., 16:48], 1) << 4
    scales, minima = scaled(floats(blocks, 0), small), scaled(floats(blocks, 2), low)
    return eight_bits(codes, scales, -minima)


def q6_k(blocks: Tensor) -> Quantized:
    """d sc (q - 32), groups of 16: 128 bytes of low bits, 64 of upper bits, 16 of sc, d last"""
    low = halves(blocks[..., :128].unflatten(-1, (2, 64)))  # per half of the block
    upper = bit_planes(blocks[..., 128:192].unflatten(-1, (2, 32)), 2)
    codes = (low | upper << 4).flatten(-2).to(torch.int8) - 32
    small = blocks[..., 192:208].contiguous().view(torch.int8)
    return eight_bits(codes, scaled(floats(blocks, 208), small))


DECODERS: Mapping[str, Callable[[Tensor], Quantized]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
