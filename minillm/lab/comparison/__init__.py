"""`minillm compare`: quality, size and speed of quantised models.

| file | contents |
|---|---|
| `windows.py` | the text: token windows that all models score |
| `metrics.py` | bits per byte, KL divergence and top-1 agreement, with standard errors |
| `candidates.py` | folders, GGUF files and methods: how each becomes a model |
| `sizes.py` | bytes on disk and in memory, by kind of tensor |
| `speed.py` | decode steps of all models in one engine |
| `run.py` | the comparison, as JSON data |
| `table.py`, `plot.py` | the results as tables and as a figure |
"""
