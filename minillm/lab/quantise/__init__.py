"""Making quantised checkpoints: `minillm quantize`. What reads them is in `minillm/quantization/`.

| file | contents |
|---|---|
| `recipe.py` | a method with its settings, and the formats that can hold the result |
| `calibration.py`, `calibration_text.py` | the inputs of each matrix while a text runs |
| `gptq.py`, `awq.py`, `smoothquant.py` | calibrated methods; `statistics.py`: what they record |
| `grid.py`, `nf4.py`, `fp8.py` | methods without calibration |
| `making.py` | quantises one matrix by a recipe |
| `quantize_layers.py`, `quantize_folder.py` | a model layer by layer, in place or into a folder |
| `writers.py` | checkpoint formats |
| `gguf_export.py` | a GGUF file; `gguf_*.py`: its metadata, blocks of weights, bytes |
"""
