"""LLM.int8() (Dettmers et al., 2022, arXiv 2208.07339): 8-bit products without the outliers.

    x W^T = o W'^T + s_x s_w (x_8 W_8^T),   o: the entries of x with |x| >= 6, x_8: the others

Rows of weights and of inputs have a scale each, max |.| / 127. A single outlier would take the
precision of all other entries of its row, so outliers are multiplied in 16 bits.

The paper takes whole columns: those with an outlier in any row of the batch. A row's result then
depends on the other rows. Here each row keeps its own outliers, so results are batch-invariant. The
checkpoint format stores only the codes and scales of weights (`rounding.round_symmetric`). This
function is the reference of the engine's product (`outliers.py`).
"""

from torch import Tensor

from minillm.quantization.quantized import Quantized

THRESHOLD = 6.0


def llm_int8_product(x: Tensor, weight: Quantized, threshold: float = THRESHOLD) -> Tensor:
    """[N, in] with int8 codes [out, in] and scales [out, 1] -> [N, out]"""
    outlying = x.abs() >= threshold
    rest = x.masked_fill(outlying, 0).float()
    scale = (rest.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    codes = (rest / scale).round()
    # Products of 8-bit codes and their sums are whole numbers: exact in float64, in any order.
    sums = codes.double() @ weight.codes.double().T
    inner = sums.float() * scale * weight.scales.float().T
    outer = x.masked_fill(~outlying, 0).float() @ weight.dense().T
    return (inner + outer).to(x.dtype)
