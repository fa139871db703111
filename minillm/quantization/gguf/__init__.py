"""The weights of GGUF files.

| file | contents |
|---|---|
| `blocks.py` | decodes the blocks of each tensor type |
| `tensors.py` | headers and slices of a file's tensors, under the names of the model |
| `format.py` | GGUF as a checkpoint format of the loader |
"""
