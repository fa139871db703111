"""The weights of GGUF files.

| file | contents |
|---|---|
| `blocks.py` | decodes the blocks of each tensor type |
| `encode.py` | quantises into blocks of 32 weights |
| `tensors.py` | headers and slices of a file's tensors, under the names of the model |
| `format.py` | GGUF as a checkpoint format of the loader |
"""
