"""The memory of a model, computed from its shapes: weights, KV cache, activations, and the plan.

No model is run, so large models take no longer than small ones. Operations, bytes and time of a
step are in `lab/roofline.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

from minillm.cache.spec import cache_spec
from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.plan.weight_sizes import WeightSizes, dtype_bytes

CUBLAS_WORKSPACE = 2**25  # bytes per stream on Hopper, more than elsewhere


def weight_bytes(
    config: ModelConfig, dtype: str | None = None, weights: WeightSizes | None = None
) -> int:
    """Bytes of all weights, quantised as `weights` or in `dtype` (default: the checkpoint's)."""
    return (weights or WeightSizes.plain(dtype or config.dtype)).total(config)


def kv_bytes_per_token(config: ModelConfig, dtype: str | None = None) -> int:
    """Bytes of one token in the KV cache, over all layers; for MLA those of the latent."""
    return block_bytes(config, 1, dtype)


def block_bytes(config: ModelConfig, block_size: int, dtype: str | None = None) -> int:
    """Bytes of a block of `block_size` tokens, over all layers."""
    return config.num_layers * layer_bytes(config, block_size, dtype or config.dtype)


def layer_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of a block in one layer; `dtype` "int8" is that of a quantised cache."""
    spec = cache_spec(config, dtype)
    return spec.block_bytes(block_size, 1 if spec.int8 else dtype_bytes(dtype))


def attention_widths(config: ModelConfig) -> tuple[int, int]:
    """Values of a token's query and of its attention output, over all heads. These are also the
    multiply-adds of each (query, key) pair for the score and for the output."""
    if config.mla:
        latent = config.num_heads * config.mla.kv_lora_rank
        return latent + config.num_heads * config.mla.qk_rope_head_dim, latent
    width = config.num_heads * config.head_dim
    return width, width


def activation_peak_bytes(
    config: ModelConfig, num_tokens: int, num_logits: int, dtype: str | None = None
) -> int:
    """Estimated peak bytes of activations in a step: those of one layer, as layers reuse buffers.

    Per token these are the residual, the normalised input and the output, and the larger of the
    MLP's gate, up and product vectors (of every chosen expert) and attention's queries, keys,
    values and outputs. The peak is at the logits (in `dtype` and in float32) if those are larger.
    Attention scores are not included, because kernels keep only one tile of them at a time.
    """
    hidden, moe = config.hidden_size, config.moe
    query_width, output_width = attention_widths(config)
    inner = query_width + output_width + cache_spec(config).block_values(1)
    if config.mla:  # the query before the key up-projection is absorbed
        inner += config.num_heads * (config.mla.qk_nope_head_dim + config.mla.qk_rope_head_dim)
    if moe is None or not all(config.is_moe_layer(i) for i in range(config.num_layers)):
        inner = max(inner, 3 * config.intermediate_size)
    if moe is not None:
        chosen = moe.num_experts_per_token * (3 * moe.intermediate_size + 2 * hidden)
        inner = max(inner, chosen + 3 * moe.shared_intermediate_size)
    value_bytes = dtype_bytes(dtype or config.dtype)
    layer = num_tokens * (3 * hidden + inner) * value_bytes
    logits = num_logits * config.vocab_size * (value_bytes + 4)
    return max(layer, num_tokens * hidden * value_bytes + logits)


@dataclass(frozen=True)
class PlanSettings:
    """The inputs of `memory_plan`; names are those of the engine's arguments."""

    dtype: str
    kv_dtype: str
    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    padding: int = 0  # tokens and sequences that a step may have beside these
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    copied_weight_bytes: int = 0  # second copies of weights in another layout
    cuda_graphs: bool = False  # whether decode steps are captured
    num_drafts: int = 0  # maximum drafts per sequence and step, each with a row of logits
    copied_draft_bytes: int = 0  # `copied_weight_bytes` of the draft model
    weight_bytes: int | None = None  # of quantised weights; None: all are in `dtype`
    draft_weight_bytes: int | None = None  # the same of the draft model
    head_weights: int = 0  # number of weights of draft heads, which count as a draft model's
    head_values: int = 0  # values per cached token that draft heads read

    def __post_init__(self) -> None:
        sizes = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be in (0, 1]."
            )


# Bytes of the KV cache of what is left for it, the bytes of a block, and the settings.
CacheOf = Callable[[int, int, PlanSettings], int]


@dataclass(frozen=True)
class BatchFit:
    """The largest batch of sequences of `context` tokens that fits."""

    context: int
    batch: int


@dataclass(frozen=True)
class MemoryPlan:
    """The use of memory, computed before anything is loaded; sizes in bytes.

    memory = reserve + weights + activations + KV cache. `kv_cache_bytes` is what is left for the
    KV cache (negative if the other parts are too large), and `num_tokens` the tokens it holds, in
    whole blocks. With a draft model sizes are sums over both models. The model fits if one request
    of `max_model_len` tokens does; otherwise `shortfall_bytes` more memory is needed, and each hint
    is a change that is enough on its own.
    """

    settings: PlanSettings
    memory_bytes: int
    reserve_bytes: int
    weight_bytes: int
    activation_bytes: int
    graph_bytes: int  # part of `activation_bytes`: the memory pool of CUDA graphs
    kv_cache_bytes: int
    kv_bytes_per_token: int
    block_bytes: int  # of one block, over all layers
    draft_weight_bytes: int  # part of `weight_bytes`: the draft model's
    draft_block_bytes: int  # part of `block_bytes`: the draft model's
    num_tokens: int
    shortfall_bytes: int
    combinations: tuple[BatchFit, ...]
    hints: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether one request of `max_model_len` tokens can be served."""
        return self.shortfall_bytes == 0


def memory_plan(
    config: ModelConfig,
    memory_bytes: int,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    max_model_len: int | None = None,
    draft: ModelConfig | None = None,
    weights: WeightSizes | None = None,
    draft_weights: WeightSizes | None = None,
    cache_of: CacheOf | None = None,
    **settings: Any,
) -> MemoryPlan:
    """Plan the memory of an engine that uses the share `gpu_memory_utilization` of `memory_bytes`.

    The rest is a reserve for memory that is not counted (runtime, workspaces, graph nodes). All
    tokens are kept in the KV cache, even with a sliding window. A `draft` model has its own KV
    cache with as many blocks; its activations are never live together with the target's. Without
    `cache_of` the KV cache has all that is left. `settings` are more fields of `PlanSettings`.
    """
    known = PlanSettings(
        dtype=dtype or config.dtype,
        kv_dtype=kv_dtype or dtype or config.dtype,
        max_model_len=config.longest_context if max_model_len is None else max_model_len,
        weight_bytes=None if weights is None else weights.total(config),
        draft_weight_bytes=None
        if draft is None or draft_weights is None
        else draft_weights.total(draft),
        **settings,
    )
    if memory_bytes < 1:
        raise ConfigError(f"memory_bytes is {memory_bytes}; it must be at least 1.")
    planned = partial(_plan, config, draft, memory_bytes, cache_of)
    plan = planned(known)
    return plan if plan.fits else replace(plan, hints=_hints(config, draft, plan, planned))


def _plan(
    config: ModelConfig,
    draft: ModelConfig | None,
    memory_bytes: int,
    cache_of: CacheOf | None,
    settings: PlanSettings,
) -> MemoryPlan:
    weights = settings.weight_bytes or weight_bytes(config, settings.dtype)
    weights += settings.copied_weight_bytes
    num_tokens, block = settings.max_num_batched_tokens + settings.padding, settings.block_size
    num_seqs = settings.max_num_seqs + settings.padding
    num_logits = min(num_seqs * (1 + settings.num_drafts), num_tokens)
    activations = activation_peak_bytes(config, num_tokens, num_logits, settings.dtype)
    each, draft_weights, draft_each = block_bytes(config, block, settings.kv_dtype), 0, 0
    if draft is not None:
        draft_weights = settings.draft_weight_bytes or weight_bytes(draft, settings.dtype)
        draft_weights += settings.copied_draft_bytes
        draft_each = block_bytes(draft, block, settings.kv_dtype)
        num_draft_logits = min(num_seqs, num_tokens)
        peak = activation_peak_bytes(draft, num_tokens, num_draft_logits, settings.dtype)
        activations = max(activations, peak)
    elif settings.head_weights:
        value_bytes = dtype_bytes(settings.dtype)
        draft_weights = settings.head_weights * value_bytes
        draft_each = settings.head_values * block * value_bytes
    weights, each = weights + draft_weights, each + draft_each
    # All CUDA graphs share one memory pool; the largest is a decode step without its logits.
    rows = num_seqs * (1 + settings.num_drafts) * settings.cuda_graphs
    # Its stream has a workspace of cuBLAS, as the usual stream has, which the reserve holds.
    graphs = activation_peak_bytes(config, rows, 0, settings.dtype)
    graphs += CUBLAS_WORKSPACE * settings.cuda_graphs
    activations += graphs
    usable = int(memory_bytes * settings.gpu_memory_utilization)
    left = usable - weights - activations
    size = left if cache_of is None else cache_of(left, each, settings)
    blocks = max(0, size // each) if size <= left else 0
    missing = max(ceil(settings.max_model_len / block) * each - size, size - left)
    return MemoryPlan(
        settings=settings,
        memory_bytes=memory_bytes,
        reserve_bytes=memory_bytes - usable,
        weight_bytes=weights,
        activation_bytes=activations,
        graph_bytes=graphs,
        kv_cache_bytes=size,
        kv_bytes_per_token=each // block,
        block_bytes=each,
        draft_weight_bytes=draft_weights,
        draft_block_bytes=draft_each,
        num_tokens=blocks * block,
        shortfall_bytes=max(0, ceil(missing / settings.gpu_memory_utilization)),
        combinations=_combinations(blocks, block, settings.max_model_len),
    )


def _combinations(num_blocks: int, block_size: int, longest: int) -> tuple[BatchFit, ...]:
    lengths = {1024 * 4**i for i in range(6)}
    contexts = {n for n in lengths if n < longest} | {longest}
    return tuple(BatchFit(n, num_blocks // ceil(n / block_size)) for n in sorted(contexts))


def _hints(
    config: ModelConfig,
    draft: ModelConfig | None,
    plan: MemoryPlan,
    planned: Callable[[PlanSettings], MemoryPlan],
) -> tuple[str, ...]:
    """Changes to a plan that does not fit, each checked to be enough on its own."""
    hints = [f"{_gib(plan.memory_bytes + plan.shortfall_bytes)} of memory"]
    if plan.settings.max_model_len > 4096:
        short = planned(replace(plan.settings, max_model_len=4096))
        if not short.fits:
            needed = short.memory_bytes + short.shortfall_bytes
            hints.append(f"{_gib(needed)} of memory and max_model_len=4096")
    changes: list[tuple[str, dict[str, Any]]] = [
        (f"max_model_len={plan.num_tokens}", {"max_model_len": max(1, plan.num_tokens)}),
        ('dtype="bfloat16"', {"dtype": "bfloat16", "kv_dtype": "bfloat16"}),
        ("max_num_batched_tokens=256", {"max_num_batched_tokens": 256}),
        ("gpu_memory_utilization=0.95", {"gpu_memory_utilization": 0.95}),
    ]
    if not any(model.mla or model.head_dim % 4 for model in filter(None, (config, draft))):
        changes.insert(1, ('kv_cache_dtype="int8"', {"kv_dtype": "int8"}))
    for text, change in changes:
        if planned(replace(plan.settings, **change)).fits:
            hints.append(text)
    return tuple(hints)


def _gib(num_bytes: int) -> str:
    return f"{ceil(num_bytes / 2**30 * 10) / 10:.1f} GiB"
