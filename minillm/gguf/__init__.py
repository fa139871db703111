"""GGUF, llama.cpp's file format: a whole model in one file. This room has all but the weights.

| file | contents |
|---|---|
| `container.py` | metadata and tensor table of a file, with every length checked |
| `types.py` | bytes and weights per block of each tensor type |
| `settings.py` | the metadata as the fields of a config.json |
| `names.py` | where each tensor of a model is in the file |

`text/gguf.py` builds the tokenizer, `quantization/gguf/` reads the weights; `lab/quantise/` writes
files.
"""
