"""Counts the (query, key) pairs of attention in a step, and checks its lengths."""

from collections import Counter
from collections.abc import Sequence

from minillm.config import ModelConfig
from minillm.errors import ConfigError


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


def check_lengths(query_lens: Sequence[int], seq_lens: Sequence[int]) -> None:
    """ConfigError unless there is a sequence, and each computes some of its own tokens."""
    if not query_lens or len(query_lens) != len(seq_lens):
        raise ConfigError(
            f"A step needs one query length per sequence and at least one sequence; "
            f"got {len(query_lens)} query lengths and {len(seq_lens)} sequence lengths."
        )
    for query, seq in zip(query_lens, seq_lens, strict=True):
        if not 1 <= query <= seq:
            raise ConfigError(
                f"A sequence of {seq} tokens cannot compute its last {query}; "
                "the query length must be between 1 and the sequence length."
            )
