"""Benchmarks of the kernels on a GPU: `python -m minillm_kernels.bench`."""
