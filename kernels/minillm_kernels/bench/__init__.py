"""Measurements of the kernels on a GPU; `minillm.lab.gpu` runs them."""
