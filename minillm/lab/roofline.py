"""The cost of a step of a model, computed from its shapes, and its time by the roofline model.

No model is run, so large models take no longer than small ones. Conventions:

* A multiply-add is two operations. Matrix products and attention are counted; norms, rotations,
  activations and biases are not (they are under one percent, and no peak rate applies to them).
* Attention is causal and counted exactly: the query at position p attends to p + 1 keys, or fewer
  with a sliding window. `torch.utils.flop_counter` counts all queries x keys instead: the same
  number for decoding, and almost twice as many for a whole prompt.
* Bytes are the minimum traffic to main memory: weights once per step (with scales and zero points
  if they are quantised), cached keys and values once per sequence. Activations are a separate
  field: with few rows they stay in the processor's cache, and with many rows the step is
  compute-bound.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.lab.hardware import Hardware
from minillm.plan.cost import attention_widths, kv_bytes_per_token, layer_bytes
from minillm.plan.parameters import all_products
from minillm.plan.weight_sizes import WeightSizes, dtype_bytes


@dataclass(frozen=True)
class StepCost:
    """Operations and bytes of one step (see the conventions at the top of this file).

    `num_operations` is the number of matrix products and attention operations: the minimum number
    of kernel launches if everything else is fused. `dtype` is that of the matrix products.
    """

    num_tokens: int
    linear_flops: int
    attention_flops: int
    weight_bytes: int
    kv_read_bytes: int
    kv_write_bytes: int
    activation_bytes: int
    num_operations: int
    dtype: str

    @property
    def flops(self) -> int:
        """All counted operations."""
        return self.linear_flops + self.attention_flops

    @property
    def total_bytes(self) -> int:
        """Weights, cache reads and cache writes: what must cross the memory bus."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, operations per byte of `total_bytes`."""
        return self.flops / self.total_bytes


def step_cost(
    config: ModelConfig,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_logits: int | None = None,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    weights: WeightSizes | None = None,
) -> StepCost:
    """Cost of one step in which sequence i computes the last `query_lens[i]` of its `seq_lens[i]`
    tokens: a whole prefill if they are equal, decoding if it is 1, otherwise a chunk.

    `num_logits` is the number of rows of logits (default: one per sequence). `weights` are the
    sizes of quantised weights. MLA attention runs on the latents for every query length, as in this
    engine.
    """
    check_lengths(query_lens, seq_lens)
    tokens = sum(query_lens)
    logits = len(query_lens) if num_logits is None else num_logits
    dtype = dtype or config.dtype
    sizes = weights or WeightSizes.plain(dtype)
    products = all_products(config)
    used = sum(n * p.used * p.inputs * p.outputs for p, n in products.items())
    macs = tokens * used + logits * config.hidden_size * config.vocab_size
    pairs, visible = attention_counts(config, query_lens, seq_lens)
    query_width, output_width = attention_widths(config)
    moved = tokens * sum(n * p.used * (p.inputs + p.outputs) for p, n in products.items())
    moved += tokens * config.num_layers * (query_width + output_width)
    moved += logits * (config.hidden_size + config.vocab_size)
    value_bytes = dtype_bytes(dtype)
    return StepCost(
        num_tokens=tokens,
        linear_flops=2 * macs,
        attention_flops=2 * pairs * (query_width + output_width),
        weight_bytes=sizes.read(config, tokens, logits),
        kv_read_bytes=visible * layer_bytes(config, 1, kv_dtype or dtype),
        kv_write_bytes=tokens * kv_bytes_per_token(config, kv_dtype or dtype),
        activation_bytes=moved * value_bytes,
        num_operations=products.total() + config.num_layers + (1 if logits else 0),
        dtype=sizes.products or dtype,
    )


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step's bytes, operations and calls. The larger of the first two is a bound."""

    memory_seconds: float
    compute_seconds: float
    overhead_seconds: float

    @property
    def seconds(self) -> float:
        """max(bytes / bandwidth, operations / rate) + overhead."""
        return max(self.memory_seconds, self.compute_seconds) + self.overhead_seconds

    @property
    def bound(self) -> Literal["memory", "compute", "overhead"]:
        """The largest of the three, which is the bottleneck."""
        largest = max(self.memory_seconds, self.compute_seconds, self.overhead_seconds)
        if largest == self.overhead_seconds:
            return "overhead"
        return "memory" if largest == self.memory_seconds else "compute"


def step_time(cost: StepCost, hardware: Hardware, num_operations: int | None = None) -> StepTime:
    """Predict the time of a step by the roofline model (Williams et al., 2009) plus overhead.

    Each of `num_operations` launches adds the hardware's overhead (default: those of `cost`; 0 for
    a CUDA graph, whose launches overlap with computation).
    """
    launches = cost.num_operations if num_operations is None else num_operations
    return StepTime(
        memory_seconds=cost.total_bytes / hardware.bandwidth,
        compute_seconds=cost.flops / hardware.rate(cost.dtype),
        overhead_seconds=launches * hardware.overhead,
    )


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
