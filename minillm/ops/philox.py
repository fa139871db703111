"""Philox random numbers, re-exported from `minillm_kernels.philox`, which the kernels share."""

from minillm_kernels.philox import (
    WORD,
    Purpose,
    philox,
    random_words,
    random_words_of_vocabulary,
    to_gumbel,
    to_uniform,
)

__all__ = [
    "WORD",
    "Purpose",
    "philox",
    "random_words",
    "random_words_of_vocabulary",
    "to_gumbel",
    "to_uniform",
]
