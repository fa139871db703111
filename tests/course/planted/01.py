"""Grouped-query attention is counted by its key-value heads: the queries per head are lost."""

from minillm.plan import cost


def _attention_widths(config):
    width = config.num_kv_heads * config.head_dim
    return width, width


cost._attention_widths = _attention_widths
