"""SmoothQuant (Xiao et al., 2022, arXiv 2211.10438, equation 4): move outliers of activations into
the weights, so that both fit into 8 bits.

Input j is divided by s_j, and column j of the weights multiplied by it:

    s_j = max |x_j|^a / max |w_j|^(1 - a)

With a = 0.5 the largest input and the largest weight of a channel become equal. The division is
folded into the norm before the matrices, at no cost (`lab/quantise/scaled_pairs.py`).
"""

from torch import Tensor

from minillm.lab.quantise.statistics import InputStatistics

SMALLEST = 1e-5


def smooth_scales(weight: Tensor, statistics: InputStatistics, alpha: float = 0.5) -> Tensor:
    """The scales s [in] of all matrices that read the same input, stacked as [rows, in]."""
    inputs = statistics.largest.clamp(min=SMALLEST)
    weights = weight.abs().amax(0).clamp(min=SMALLEST)
    return (inputs**alpha / weights ** (1 - alpha)).clamp(min=SMALLEST)
