"""FP8 weights: 8-bit floating point (e4m3, 3 bits of mantissa) with a scale per row or per block.

    scale = max |w| / 448,  w' = scale * e4m3(w / scale)

448 is the largest e4m3 number (Micikevicius et al., 2022, arXiv 2209.05433). The mantissa has the
same relative precision at all sizes, so a large weight does not cost the precision of small ones,
but near the maximum the steps are 16 times those of 8-bit integers. Blocks of 128 x 128 are those
of DeepSeek-V3 (2024, arXiv 2412.19437, section 3.3.2).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.lab.quantise.recipe import BLOCK
from minillm.quantization.quantized import Quantized

LARGEST = 448.0
SMALLEST = 1e-12  # scale of zeros


def round_fp8(
    weight: Tensor, dtype: torch.dtype = torch.float32, blocks: bool = False
) -> Quantized:
    """Quantise [out, in], with scales in `dtype`: a scale per row, or per block of 128 x 128. The
    last rows may be an incomplete block; `in` is a multiple of 128."""
    weight = weight.float()
    largest = block_maximum(weight) if blocks else weight.abs().amax(1, keepdim=True)
    scales = (largest / LARGEST).clamp(min=SMALLEST).to(dtype)  # [out, 1] or [out, in / 128]
    groups = weight.unflatten(1, (scales.shape[1], -1)) / scales.float()[..., None]
    codes = groups.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)  # a cast may give NaN above 464
    return Quantized(codes.flatten(1), scales)


def block_maximum(weight: Tensor) -> Tensor:
    """The largest |w| of the block of each row: [out, in] -> [out, in / 128]"""
    out, width = weight.shape
    padded = F.pad(weight.abs(), (0, 0, 0, -out % BLOCK))
    largest = padded.view(-1, BLOCK, width // BLOCK, BLOCK).amax((1, 3))
    return largest.repeat_interleave(BLOCK, 0)[:out]
