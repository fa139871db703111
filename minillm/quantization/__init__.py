"""Quantised weights: reading public checkpoint formats, and computing with them.

| file | contents |
|---|---|
| `quantized.py` | `Quantized`: codes, scales and zero points of a matrix, and its dense values |
| `methods.py` | the `LinearMethod`s of quantised matrices: while loading, and loaded |
| `panels.py` | the layout of the C functions, chosen on a CPU |
| `outliers.py` | LLM.int8()'s products: outlying inputs in 16 bits |
| `kernels.py` | the layouts of the Triton kernels, chosen on a GPU |
| `formats.py` | what a checkpoint format must describe, and which one a checkpoint has |
| `consistency.py` | whether `quantization_config` and the tensors of the files agree |
| `readers/` | one file per checkpoint format; `packed.py` for those of 32-bit words, as tables |
| `rounding.py` | round-to-nearest quantisation, also while a 16-bit checkpoint is loaded |

Files are made in `lab/quantise/`.
"""
