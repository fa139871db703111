"""What a step costs on several devices, by counting: predictions, not measurements.

    tensor          a step waits for 2 sums per layer, one more, and a gather of the choices
    pipeline        m groups of sequences follow each other through p stages, which send to the next
    whole experts   no more is sent, but the device with the most work decides
    own attention   no sums: tokens travel to their experts and back, two all-to-alls per layer

`plan/cost.py` counts operations and bytes of what a device holds (`parallel_layout.py`), so one
device gets what `cost.step_time` says. Communication is added to that time: nothing here overlaps
the two.

    time of a group on a stage  =  max(bytes / bandwidth, operations / rate) + launches + link
    a token of every sequence   =  max(sum of the stages, m x slowest stage)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.lab.expert_load import expert_balance, most_experts_read, ranks_of_a_token
from minillm.lab.links import (
    LINKS,
    Link,
    all_gather_seconds,
    all_reduce,
    all_to_all_seconds,
    send_seconds,
)
from minillm.lab.parallel_layout import (
    ALONE,
    Layout,
    check_layout,
    cut_layers,
    device_config,
    device_memory,
)
from minillm.models.presets import preset
from minillm.plan.cost import MemoryPlan, StepCost, StepTime, dtype_bytes, step_cost, step_time
from minillm.plan.hardware import DATASHEET, Hardware
from minillm.plan.parameters import all_products, norm_parameters

CHOICE_BYTES = 16  # of a row and rank: a value and a token id
ID_BYTES = 8

# ---- time --------------------------------------------------------------------------------------


class StageTime(NamedTuple):
    """One group of sequences on one stage: its slowest device, and what it waits for."""

    cost: StepCost
    device: StepTime
    communication: float

    @property
    def seconds(self) -> float:
        """Both."""
        return self.device.seconds + self.communication


@dataclass(frozen=True)
class ParallelTime:
    """A prediction.

    Attributes:
        seconds: decoding: until every sequence has one more token; a prompt: until its first.
        tokens: that come out of it, in all.
        communication: share of the time that devices send, or wait for what is sent, from 0 to 1.
        utilisation: share of the time that a stage has work.
        num_groups: groups of sequences, or chunks of a prompt, that follow each other (m).
        stages: what the largest group, or the last chunk, takes.
    """

    seconds: float
    tokens: int
    communication: float
    utilisation: float
    num_groups: int
    stages: tuple[StageTime, ...]

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Devices:
    """Where a model runs: devices, how they are connected, and how it lies on them.

    Attributes:
        link: between the devices of a stage.
        stage_link: between stages (default: the same).
        is_recorded: steps are recorded graphs, whose launches cost nothing.
        weight_size: bytes of a weight of a product, such as 1 for FP8 (default: the dtype's).
            Products are still counted at the rate of the dtype.
    """

    hardware: Hardware
    link: Link
    layout: Layout = ALONE
    stage_link: Link | None = None
    is_recorded: bool = False
    weight_size: float | None = None


class Precision(NamedTuple):
    """Of products, sums and weights; of the cache."""

    dtype: str
    kv_dtype: str


def precision(config: ModelConfig, dtype: str | None, kv_dtype: str | None) -> Precision:
    """Names with their defaults, as in `cost.step_cost`."""
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
    """What each stage takes for one group of sequences, as `cost.step_cost` describes them."""
    layout, size = devices.layout, devices.layout.tensor
    value_bytes, tokens = dtype_bytes(types.dtype), sum(query_lens)
    if layout.own_attention:  # of the device with the most sequences
        most = ceil(len(query_lens) / size)
        query_lens, seq_lens = query_lens[:most], seq_lens[:most]
        num_logits = min(num_logits, most)
    found = []
    for layers in cut_layers(config, layout.pipeline):
        is_last = layers.stop == config.num_layers
        mine = device_config(config, layout, layers)
        logits = num_logits if is_last else 0
        cost = step_cost(mine, query_lens, seq_lens, num_logits=logits, **types._asdict())
        own = sum(query_lens)
        if layout.expert_parallel and any(map(mine.is_moe_layer, range(mine.num_layers))):
            cost = _with_whole_experts(cost, mine, layout, own, tokens, types.dtype)
        if devices.weight_size is not None:
            table = mine.vocab_size * mine.hidden_size if logits else 0
            kept = value_bytes * (norm_parameters(mine) + own * mine.hidden_size + table)
            small = (cost.weight_bytes - kept) * devices.weight_size / value_bytes
            cost = replace(cost, weight_bytes=round(kept + small))
        time = step_time(cost, devices.hardware, 0 if devices.is_recorded else None)
        waiting = _communication(mine, devices, layers.start == 0, own, logits, value_bytes)
        if layout.pipeline > 1:  # the last one sends the chosen tokens back to the first
            sent = ID_BYTES * num_logits if is_last else own * config.hidden_size * value_bytes
            waiting += send_seconds(devices.stage_link or devices.link, sent)
        found.append(StageTime(cost, time, waiting))
    return tuple(found)


def _with_whole_experts(
    cost: StepCost, mine: ModelConfig, layout: Layout, own: int, tokens: int, dtype: str
) -> StepCost:
    """The step of the device with the most work: `cost` counted `own` tokens through shares of all
    experts; `tokens` tokens of all devices come to its whole ones."""
    moe, size = mine.moe, layout.tensor
    if moe is None or size == 1:
        return cost
    law = moe.num_experts, moe.num_experts_per_token, size, tokens
    mean = moe.num_experts / size * (1 - (1 - law[1] / law[0]) ** tokens)
    more = most_experts_read(*law) / mean
    products = [each for each in all_products(mine) if each.part == "experts"]
    value_bytes = dtype_bytes(dtype)
    read = sum(p.parameters_read(tokens) * more - p.parameters_read(own) for p in products)
    rows = tokens / expert_balance(*law) - own
    macs = rows * sum(p.used * p.inputs * p.outputs for p in products)
    return replace(
        cost,
        weight_bytes=round(cost.weight_bytes + read * value_bytes),
        linear_flops=round(cost.linear_flops + 2 * macs),
    )


def _communication(
    mine: ModelConfig, devices: Devices, is_first: bool, tokens: int, logits: int, value_bytes: int
) -> float:
    """Seconds that a stage spends in its collectives; `tokens` are those of one device."""
    link, size = devices.link, devices.layout.tensor
    if size == 1:
        return 0.0
    row_bytes = mine.hidden_size * value_bytes
    if devices.layout.own_attention and mine.moe is not None:
        others = ranks_of_a_token(size, mine.moe.num_experts_per_token) * (size - 1) / size
        routed = sum(map(mine.is_moe_layer, range(mine.num_layers)))
        both_ways = 2 * all_to_all_seconds(link, size, tokens * others * row_bytes)
        return routed * both_ways + (all_reduce(link, size, ID_BYTES).seconds if is_first else 0.0)
    sums = 2 * mine.num_layers + is_first
    seconds = sums * all_reduce(link, size, tokens * row_bytes).seconds
    return seconds + (all_gather_seconds(link, size, logits * CHOICE_BYTES) if logits else 0.0)


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
    """Predict a token for each of `batch` sequences of `context` tokens.

    Args:
        num_groups: into which the sequences are divided, of equal size but for one (default: as
            many as there are stages, or sequences if they are fewer).
    """
    check_layout(config, devices.layout)
    stages = devices.layout.pipeline
    if batch < 1 or context < 1 or not 1 <= (num_groups or 1) <= batch:
        raise ConfigError(
            f"batch is {batch}, context is {context} and num_groups is {num_groups}; they must be "
            "at least 1, and there are not more groups than sequences."
        )
    groups = num_groups or min(stages, batch)
    rows = ceil(batch / groups)
    types = precision(config, dtype, kv_dtype)
    times = stage_times(config, devices, [1] * rows, [context] * rows, types, rows)
    through = sum(each.seconds for each in times)
    slowest = max(times, key=lambda each: each.seconds)
    period = max(through, groups * slowest.seconds)
    if period > through:
        share = slowest.communication / slowest.seconds
    else:
        share = sum(each.communication for each in times) / through
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
    """Predict the time from an empty pipeline to the first token of one prompt of `num_tokens`
    tokens, computed in `num_chunks` chunks of equal size but for the last."""
    check_layout(config, devices.layout)
    if not 1 <= num_chunks <= num_tokens:
        raise ConfigError(
            f"num_tokens is {num_tokens} and num_chunks is {num_chunks}; there is at least 1 "
            "chunk, and there are not more chunks than tokens."
        )
    types = precision(config, dtype, kv_dtype)
    chunk = ceil(num_tokens / num_chunks)
    ends = [*range(chunk, num_tokens, chunk), num_tokens]
    free = [0.0] * devices.layout.pipeline  # when each stage has done all chunks so far
    busy = sent = before = 0.0
    times: tuple[StageTime, ...] = ()
    for start, end in zip([0, *ends], ends, strict=False):
        logits = int(end == num_tokens)
        times = stage_times(config, devices, [end - start], [end], types, logits)
        before = 0.0
        for stage, each in enumerate(times):
            before = free[stage] = max(before, free[stage]) + each.seconds
            busy, sent = busy + each.seconds, sent + each.communication
    utilisation = busy / (devices.layout.pipeline * before)
    return ParallelTime(before, 1, sent / busy, utilisation, len(ends), times)


# ---- predictions -------------------------------------------------------------------------------

LARGE_MODELS = ("llama-3.1-70b", "llama-3.1-405b", "deepseek-v3")
FP8 = frozenset({"deepseek-v3"})  # published with weights of one byte
BATCHES = (1, 64)


@dataclass(frozen=True)
class Prediction:
    """What to expect of a model on some devices.

    Attributes:
        memory: of the device with the least room.
        context: tokens of every sequence, and of the prompt.
        decode: by batch size.
        prefill: of one prompt of `context` tokens.
    """

    devices: Devices
    memory: MemoryPlan
    context: int
    decode: dict[int, ParallelTime]
    prefill: ParallelTime

    def holds(self, batch: int) -> bool:
        """Whether so many sequences of `context` tokens have room."""
        layout, block = self.devices.layout, self.memory.settings.block_size
        rows = ceil(batch / layout.tensor) if layout.own_attention else batch
        blocks = rows * ceil(self.context / block)
        return self.memory.kv_cache_bytes > 0 and self.memory.num_tokens >= blocks * block

    @property
    def cache_tokens(self) -> int:
        """Tokens that all devices together cache."""
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
    """Predict decoding for each batch size, a prompt, and what has room; `memory` is a plan of
    `device_memory` that is known already."""
    if memory is None:
        memory = device_memory(
            config,
            devices.hardware.memory_bytes,
            devices.layout,
            weight_size=devices.weight_size,
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


def large_model_predictions(
    hardware: Sequence[str] = ("h100-sxm", "h200"),
    links: Sequence[str] = ("nvlink", "pcie"),
    sizes: Sequence[int] = (1, 2, 4, 8),
) -> dict[tuple[str, str, str, Layout], Prediction]:
    """Predictions for models that few can run, by (preset, hardware, link, layout): with recorded
    steps, in bf16, and DeepSeek-V3 with the FP8 weights that it is published with. A mixture also
    has layouts with whole experts, and with an attention of each device's own."""
    found = {}
    for name in LARGE_MODELS:
        config = preset(name)
        layouts = [Layout(size) for size in sizes]
        if config.moe is not None:
            several = [size for size in sizes if size > 1]
            layouts += [Layout(size, 1, True, own) for own in (False, True) for size in several]
        for machine in hardware:
            for link in links:
                for layout in layouts:
                    devices = Devices(
                        DATASHEET[machine],
                        LINKS[link],
                        layout,
                        is_recorded=True,
                        weight_size=1.0 if name in FP8 else None,
                    )
                    found[name, machine, link, layout] = predict(config, devices)
    return found
