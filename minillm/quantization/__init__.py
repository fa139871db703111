"""Quantised weights: reading public checkpoint formats, making them, and computing with them.

| file | contents |
|---|---|
| `quantized.py` | `Quantized`: codes, scales and zero points of a matrix, and its dense values |
| `integers.py` | order of 4-bit and 8-bit codes inside bytes and 32-bit words |
| `methods.py` | the `LinearMethod`s of quantised matrices: while loading, and loaded |
| `panels.py` | the layout of the C functions, chosen on a CPU |
| `outliers.py` | LLM.int8()'s products: outlying inputs in 16 bits |
| `kernels.py` | the layouts of the Triton kernels, chosen on a GPU |
| `formats.py` | what a checkpoint format must describe, and which one a checkpoint has |
| `consistency.py` | whether `quantization_config` and the tensors of the files agree |
| `readers/` | one file per checkpoint format |
| `rounding.py` | round-to-nearest quantisation, also while a 16-bit checkpoint is loaded |
| `recipe.py` | a method with its settings, and the formats that can hold the result |
| `gptq.py`, `awq.py`, `smoothquant.py` | calibrated methods; `statistics.py`: what they record |
| `llm_int8.py`, `nf4.py`, `fp8.py` | methods without calibration |
| `making.py` | quantises one matrix by a recipe; `models/quantize_layers.py` runs it |
| `writers/` | one file per checkpoint format |
"""
