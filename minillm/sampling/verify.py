"""Which drafts become tokens.

    known tokens   ... t | d1  d2  d3  d4         drafts
    sampled          s1  | s2  s3  s4  s5         what plain decoding samples at each position,
                      =     =   x                 as long as the tokens before it are right
    accepted         s1    s2  s3                 up to the first sample that differs from its draft

Every sampled token is the one that plain decoding would sample there: its logits follow the same
tokens, and its noise is a function of seed, sample index and position. So the tokens of a sequence
do not depend on what was drafted (Leviathan et al., 2023, show the law; here even the sample is the
same). A draft model that draws with the same noise agrees more often (Daliri, Musco, Suresh, 2024).
"""

from collections.abc import Collection, Sequence


def match(samples: Sequence[int], drafts: Sequence[int]) -> int:
    """How many tokens are accepted: those whose predecessors were all drafted right.

    Args:
        samples: k + 1 tokens, one at each of the positions that were computed.
        drafts: k tokens; the logits of `samples[i + 1]` follow `drafts[i]`.
    """
    for place, draft in enumerate(drafts):
        if samples[place] != draft:
            return place + 1
    return len(samples)


def until_stop(tokens: Sequence[int], stop_ids: Collection[int]) -> int:
    """How many of these tokens belong to the sequence: none after one that ends it."""
    for place, token in enumerate(tokens, start=1):
        if token in stop_ids:
            return place
    return len(tokens)
