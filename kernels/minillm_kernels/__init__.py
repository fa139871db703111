"""Triton kernels of minillm, and `reference`, the plain-torch definition of every operation."""
