"""Philox random numbers, those of `minillm_kernels.philox`, which the kernels share."""

from minillm_kernels.philox import WORD as WORD
from minillm_kernels.philox import Purpose as Purpose
from minillm_kernels.philox import philox as philox
from minillm_kernels.philox import random_words as random_words
from minillm_kernels.philox import random_words_of_vocabulary as random_words_of_vocabulary
from minillm_kernels.philox import to_gumbel as to_gumbel
from minillm_kernels.philox import to_uniform as to_uniform
