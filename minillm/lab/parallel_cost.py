"""Predicted step times on several devices.

    tensor            2 all-reduces per layer, one for the embedding, and an all-gather of each
                      rank's candidates for the next token
    pipeline          m microbatches pass through p stages, each of which sends to the next
    expert parallel   the communication of tensor parallelism; the most loaded device sets the time
    own attention     data-parallel attention: no all-reduces, but two all-to-alls per layer

`roofline.py` counts operations and bytes of the part of a device (`parallel_layout.py`), so one
device takes the time of `roofline.step_time`. Communication is added to it, without overlap.

    time of a microbatch on a stage = max(bytes / bandwidth, operations / rate) + launches + link
    time per token of all sequences = max(sum of the stages, m x slowest stage)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.lab.expert_load import expert_balance, most_experts_read, ranks_of_a_token
from minillm.lab.hardware import Hardware
from minillm.lab.links import (
    Link,
    all_gather_seconds,
    all_reduce,
    all_to_all_seconds,
    send_seconds,
)
from minillm.lab.parallel_layout import (
    SINGLE_DEVICE,
    Layout,
    check_layout,
    cut_layers,
    device_config,
    device_memory,
)
from minillm.lab.roofline import StepCost, StepTime, step_cost, step_time
from minillm.plan.cost import MemoryPlan
from minillm.plan.parameters import all_products
from minillm.plan.weight_sizes import WeightSizes, dtype_bytes

CANDIDATE_BYTES = 16  # per row and rank: a value and a token id
ID_BYTES = 8

# ---- time --------------------------------------------------------------------------------------


class StageTime(NamedTuple):
    """The time of one microbatch on one stage: that of its slowest device, and communication."""

    cost: StepCost
    device: StepTime
    communication: float

    @property
    def seconds(self) -> float:
        """The sum of both."""
        return self.device.seconds + self.communication


@dataclass(frozen=True)
class ParallelTime:
    """A predicted time.

    Attributes:
        seconds: time of one token for every sequence, or of a prompt until its first token.
        tokens: number of tokens sampled in that time.
        communication: share of the time in communication, from 0 to 1.
        utilisation: share of the time in which a stage is busy.
        num_groups: number of microbatches, or of chunks of a prompt (m).
        stages: times of the largest microbatch, or of the last chunk.
    """

    seconds: float
    tokens: int
    communication: float
    utilisation: float
    num_groups: int
    stages: tuple[StageTime, ...]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all sequences together."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Devices:
    """Devices, their interconnect, and the layout of the model on them.

    Attributes:
        link: between the devices of a stage.
        stage_link: between stages (default: the same).
        is_recorded: steps are CUDA graphs, without launch overhead.
        weights: the sizes of quantised weights.
    """

    hardware: Hardware
    link: Link
    layout: Layout = SINGLE_DEVICE
    stage_link: Link | None = None
    is_recorded: bool = False
    weights: WeightSizes | None = None


class Precision(NamedTuple):
    """The dtype of products, all-reduces and weights, and that of the KV cache."""

    dtype: str
    kv_dtype: str


def precision(config: ModelConfig, dtype: str | None, kv_dtype: str | None) -> Precision:
    """The dtypes with defaults as in `roofline.step_cost`."""
    dtype = dtype or config.dtype
    return Precision(dtype, kv_dtype or dtype)


def stage_times(
    config: ModelConfig,
    devices: Devices,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    types: Precision,
    num_logits: int,
) -> tuple[StageTime, ...]:
    """The time of one microbatch on each stage; the arguments are those of `roofline.step_cost`."""
    layout, size = devices.layout, devices.layout.tensor
    value_bytes, tokens = dtype_bytes(types.dtype), sum(query_lens)
    if layout.own_attention:  # the device with the most sequences
        most = ceil(len(query_lens) / size)
        query_lens, seq_lens = query_lens[:most], seq_lens[:most]
        num_logits = min(num_logits, most)
    stages = []
    for layers in cut_layers(config, layout.pipeline):
        is_last = layers.stop == config.num_layers
        mine = device_config(config, layout, layers)
        logits = num_logits if is_last else 0
        numbers = {**types._asdict(), "weights": devices.weights}
        cost = step_cost(mine, query_lens, seq_lens, num_logits=logits, **numbers)
        own = sum(query_lens)
        if layout.expert_parallel and any(map(mine.is_moe_layer, range(mine.num_layers))):
            size_of_expert = (devices.weights or WeightSizes.plain(types.dtype)).experts
            cost = _with_whole_experts(cost, mine, layout, own, tokens, size_of_expert)
        time = step_time(cost, devices.hardware, 0 if devices.is_recorded else None)
        waiting = _communication(mine, devices, layers.start == 0, own, logits, value_bytes)
        if layout.pipeline > 1:  # the last stage sends the sampled tokens to the first
            sent = ID_BYTES * num_logits if is_last else own * config.hidden_size * value_bytes
            waiting += send_seconds(devices.stage_link or devices.link, sent)
        stages.append(StageTime(cost, time, waiting))
    return tuple(stages)


def _with_whole_experts(
    cost: StepCost, mine: ModelConfig, layout: Layout, own: int, tokens: int, value_bytes: float
) -> StepCost:
    """The cost on the most loaded device with whole experts of `value_bytes` per weight, which get
    rows from all `tokens` tokens. `cost` has the `own` tokens of a device and a share of every
    expert."""
    moe, size = mine.moe, layout.tensor
    if moe is None or size == 1:
        return cost
    load = moe.num_experts, moe.num_experts_per_token, size, tokens
    mean = moe.num_experts / size * (1 - (1 - load[1] / load[0]) ** tokens)
    more = most_experts_read(*load) / mean
    products = [product for product in all_products(mine).elements() if product.part == "experts"]
    read = sum(p.parameters_read(tokens) * more - p.parameters_read(own) for p in products)
    rows = tokens / expert_balance(*load, moe.num_groups, moe.topk_groups) - own
    macs = rows * sum(p.used * p.inputs * p.outputs for p in products)
    return replace(
        cost,
        weight_bytes=round(cost.weight_bytes + read * value_bytes),
        linear_flops=round(cost.linear_flops + 2 * macs),
    )


def _communication(
    mine: ModelConfig, devices: Devices, is_first: bool, tokens: int, logits: int, value_bytes: int
) -> float:
    """Seconds of a stage's collectives; `tokens` is the number on one device."""
    link, size = devices.link, devices.layout.tensor
    if size == 1:
        return 0.0
    row_bytes = mine.hidden_size * value_bytes
    if devices.layout.own_attention and mine.moe is not None:
        moe = mine.moe
        reached = ranks_of_a_token(size, moe.num_experts_per_token, moe.num_groups, moe.topk_groups)
        others = reached * (size - 1) / size
        routed = sum(map(mine.is_moe_layer, range(mine.num_layers)))
        both_ways = 2 * all_to_all_seconds(link, size, tokens * others * row_bytes)
        return routed * both_ways + (all_reduce(link, size, ID_BYTES).seconds if is_first else 0.0)
    sums = 2 * mine.num_layers + is_first
    seconds = sums * all_reduce(link, size, tokens * row_bytes).seconds
    return seconds + (all_gather_seconds(link, size, logits * CANDIDATE_BYTES) if logits else 0.0)


def decode_time(
    config: ModelConfig,
    devices: Devices,
    *,
    batch: int = 1,
    context: int = 1024,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    num_groups: int | None = None,
) -> ParallelTime:
    """Predict the time of one token for each of `batch` sequences at context `context`.

    Args:
        num_groups: number of microbatches (default: the number of stages, or of sequences if there
            are fewer).
    """
    check_layout(config, devices.layout)
    stages = devices.layout.pipeline
    if batch < 1 or context < 1 or not 1 <= (num_groups or 1) <= batch:
        raise ConfigError(
            f"batch is {batch}, context is {context} and num_groups is {num_groups}; they must be "
            "at least 1, and num_groups at most batch."
        )
    groups = num_groups or min(stages, batch)
    rows = ceil(batch / groups)
    types = precision(config, dtype, kv_dtype)
    times = stage_times(config, devices, [1] * rows, [context] * rows, types, rows)
    through = sum(time.seconds for time in times)
    slowest = max(times, key=lambda each: each.seconds)
    period = max(through, groups * slowest.seconds)
    if period > through:
        share = slowest.communication / slowest.seconds
    else:
        share = sum(time.communication for time in times) / through
    return ParallelTime(period, batch, share, groups * through / (stages * period), groups, times)


def prefill_time(
    config: ModelConfig,
    devices: Devices,
    *,
    num_tokens: int = 2048,
    num_chunks: int = 1,
    dtype: str | None = None,
    kv_dtype: str | None = None,
) -> ParallelTime:
    """Predict the time to the first token of one prompt of `num_tokens` tokens, starting with an
    empty pipeline, in `num_chunks` chunks of equal size (the last may be smaller)."""
    check_layout(config, devices.layout)
    if not 1 <= num_chunks <= num_tokens:
        raise ConfigError(
            f"num_tokens is {num_tokens} and num_chunks is {num_chunks}; num_tokens must be at "
            "least 1 and num_chunks from 1 to num_tokens."
        )
    types = precision(config, dtype, kv_dtype)
    chunk = ceil(num_tokens / num_chunks)
    ends = [*range(chunk, num_tokens, chunk), num_tokens]
    free = [0.0] * devices.layout.pipeline  # time at which each stage is free
    busy = sent = before = 0.0
    times: tuple[StageTime, ...] = ()
    for start, end in zip([0, *ends], ends, strict=False):
        logits = int(end == num_tokens)
        times = stage_times(config, devices, [end - start], [end], types, logits)
        before = 0.0
        for stage, time in enumerate(times):
            before = free[stage] = max(before, free[stage]) + time.seconds
            busy, sent = busy + time.seconds, sent + time.communication
    utilisation = busy / (devices.layout.pipeline * before)
    return ParallelTime(before, 1, sent / busy, utilisation, len(ends), times)


# ---- predictions -------------------------------------------------------------------------------

BATCHES = (1, 64)


@dataclass(frozen=True)
class Prediction:
    """Predictions for a model on some devices.

    Attributes:
        memory: plan of the device with the fewest KV cache tokens.
        context: tokens of every sequence and of the prompt.
        decode: decode times by batch size.
        prefill: time of one prompt of `context` tokens.
    """

    devices: Devices
    memory: MemoryPlan
    context: int
    decode: dict[int, ParallelTime]
    prefill: ParallelTime

    def holds(self, batch: int) -> bool:
        """Whether `batch` sequences of `context` tokens fit."""
        layout, block = self.devices.layout, self.memory.settings.block_size
        rows = ceil(batch / layout.tensor) if layout.own_attention else batch
        blocks = rows * ceil(self.context / block)
        return self.memory.kv_cache_bytes > 0 and self.memory.num_tokens >= blocks * block

    @property
    def cache_tokens(self) -> int:
        """Tokens in the KV caches of all devices together."""
        layout = self.devices.layout
        return self.memory.num_tokens * (layout.tensor if layout.own_attention else 1)


def predict(
    config: ModelConfig,
    devices: Devices,
    *,
    context: int = 1024,
    batches: Sequence[int] = BATCHES,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    memory: MemoryPlan | None = None,
) -> Prediction:
    """Predict decode times for each batch size, the prefill time, and memory. `memory` is a plan of
    `device_memory`, if already computed."""
    if memory is None:
        memory = device_memory(
            config,
            devices.hardware.memory_bytes,
            devices.layout,
            weights=devices.weights,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )
    decode = {
        batch: decode_time(
            config, devices, batch=batch, context=context, dtype=dtype, kv_dtype=kv_dtype
        )
        for batch in batches
    }
    prompt = prefill_time(config, devices, num_tokens=context, dtype=dtype, kv_dtype=kv_dtype)
    return Prediction(devices, memory, context, decode, prompt)
