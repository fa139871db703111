"""The prefill kernel walks over all keys, and not only over those up to its diagonal."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: kernels run in this process

from minillm_kernels import flash_attention

untouched = flash_attention.flash_attention


def whole(q, k, v, query_start, key_start, scale):
    return untouched(q, k, v, query_start, key_start, scale, causal=False)


flash_attention.flash_attention = whole
