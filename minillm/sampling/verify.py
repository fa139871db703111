"""Verification of drafts: which tokens of a step are accepted.

    input          ... t | d1  d2  d3  d4         last token and drafts
    sampled          s1  | s2  s3  s4  s5         one token per input position
                      =     =   x                 s1 = d1, s2 = d2, s3 differs from d3
    accepted         s1    s2  s3                 up to the first sample that differs from its draft

An accepted token is exactly the one that plain decoding would sample: its logits follow the same
tokens, and its noise is a function of seed, sample index and position. So drafts do not change the
output (Leviathan et al., 2023, preserve the distribution; here even the sample is the same). A
draft model that samples with the same noise agrees more often (Daliri, Musco, Suresh, 2024).
"""

from collections.abc import Collection, Sequence


def match(samples: Sequence[int], drafts: Sequence[int]) -> int:
    """Number of accepted tokens: the matching drafts, and one more sample.

    Args:
        samples: k + 1 tokens, one per computed position.
        drafts: k tokens; the logits of `samples[i + 1]` follow `drafts[i]`.
    """
    for place, draft in enumerate(drafts):
        if samples[place] != draft:
            return place + 1
    return len(samples)


def until_stop(tokens: Sequence[int], stop_ids: Collection[int]) -> int:
    """Number of tokens up to and including the first stop token."""
    for place, token in enumerate(tokens, start=1):
        if token in stop_ids:
            return place
    return len(tokens)
