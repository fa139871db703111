"""Counts the (query, key) pairs of attention in a step."""

from collections import Counter
from collections.abc import Sequence

from minillm.config import ModelConfig


def attention_counts(
    config: ModelConfig, query_lens: Sequence[int], seq_lens: Sequence[int]
) -> tuple[int, int]:
    """The (query, key) pairs of attention and the KV cache positions read, over all layers."""
    windows = Counter(config.sliding_window(layer) for layer in range(config.num_layers))
    pairs = positions = 0
    for window, layers in windows.items():
        for query, seq in zip(query_lens, seq_lens, strict=True):
            reach = seq if window is None else window
            pairs += layers * causal_pairs(query, seq, reach)
            positions += layers * min(seq, query + reach - 1)
    return pairs, positions


def causal_pairs(query: int, seq: int, window: int) -> int:
    """Sum of min(position + 1, window) over the last `query` positions of `seq`."""
    first = seq - query
    growing = max(0, min(seq, window) - first)  # queries that attend to every earlier token
    return growing * first + growing * (growing + 1) // 2 + (query - growing) * window
