"""Triton kernels of minillm, and `reference`: the one oracle for every operation."""
