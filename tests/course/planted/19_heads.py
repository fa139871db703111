"""With more ranks than KV heads, rank r holds KV head r mod (KV heads)."""

from minillm.parallel.split import Split

_right = Split.kv_heads


def kv_heads(self, num_kv_heads):
    if self.size <= num_kv_heads:
        return _right(self, num_kv_heads)
    return range(self.rank % num_kv_heads, self.rank % num_kv_heads + 1)


Split.kv_heads = kv_heads
