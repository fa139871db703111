"""Query head h attends with key head h % number of key heads: groups are dealt out like cards."""

from minillm import ops

right = ops.causal_attention


def causal_attention(q, k, v, scale, window=None):
    heads = q.shape[1]
    dealt = q.view(len(q), -1, len(k), q.shape[2]).transpose(1, 2).reshape(q.shape)
    out = right(dealt, k, v, scale, window)
    return out.view(len(q), len(k), heads // len(k), -1).transpose(1, 2).reshape(out.shape)


ops.causal_attention = causal_attention
