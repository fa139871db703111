"""The kernels for quantised weights, by format.

| file | weights | activations |
|---|---|---|
| `int4_linear.py` | 4 bits in groups, with zero points or minima | 16 bits |
| `int8_linear.py` | int8 with a scale per row | int8, rounded by `quantize_rows` |
| `scaled_linear.py` | e4m3 or int8 with scales of rows or blocks | 16 bits, or e4m3 per row |

`quantized_reference.py` has the operations in plain torch and the layout of 4-bit codes,
`quantized_config.py` the tiles. A product of few rows is bound by the bytes of its weight, so 4 and
8 bits are worth 3.5 and 2 times the speed of bf16 at most; with hundreds of rows operations count,
and only 8-bit activations are faster than bf16.
"""

from minillm_kernels.int4_linear import int4_linear
from minillm_kernels.int8_linear import int8_linear, quantize_rows
from minillm_kernels.quantized_config import Config
from minillm_kernels.scaled_linear import scaled_linear

__all__ = ["Config", "int4_linear", "int8_linear", "quantize_rows", "scaled_linear"]
