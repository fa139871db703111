"""The parallel layout of a model: tensor, pipeline, expert and data-parallel attention.

    tensor            n devices hold 1/n of every layer: heads, units, vocabulary
    pipeline          p stages hold some of the layers each
    expert parallel   each of n devices holds E/n whole experts instead of 1/n of every expert
    own attention     data-parallel attention: each of n devices holds E/n experts and the whole
                      attention, and has its own sequences

The part of a device is described by a smaller `ModelConfig` (`device_config`), so `roofline.py`
computes its weights, KV cache and steps like those of any model.
"""

from dataclasses import dataclass, replace
from typing import Any

from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.parallel import split
from minillm.parallel.split import Split, check_split, check_stages, rank_config, stage_config
from minillm.plan.cost import MemoryPlan, memory_plan
from minillm.plan.weight_sizes import WeightSizes


@dataclass(frozen=True)
class Layout:
    """The parallel layout of a model.

    Attributes:
        tensor: devices that share each layer (n).
        pipeline: stages of layers, each on `tensor` devices (p).
        expert_parallel: each expert is whole on one device.
        own_attention: data-parallel attention; devices share only the experts.
    """

    tensor: int = 1
    pipeline: int = 1
    expert_parallel: bool = False
    own_attention: bool = False

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.pipeline < 1:
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor} and pipeline_parallel_size is "
                f"{self.pipeline}; both must be at least 1."
            )
        if self.own_attention and not self.expert_parallel:
            raise ConfigError(
                "own_attention needs expert_parallel, because data-parallel devices share only "
                "whole experts; set expert_parallel=True, too."
            )

    @property
    def devices(self) -> int:
        """Number of devices over all stages."""
        return self.tensor * self.pipeline


SINGLE_DEVICE = Layout()


def check_layout(config: ModelConfig, layout: Layout) -> None:
    """Raise ConfigError if the layout does not divide the model; the message says what would."""
    if not layout.own_attention:
        check_split(config, layout.tensor)
    check_stages(config, layout.pipeline)
    if not layout.expert_parallel:
        return
    if config.moe is None:
        raise ConfigError(
            f"This {config.family} model has no experts; leave expert parallelism out."
        )
    experts, units = config.moe.num_experts, config.moe.intermediate_size
    if experts % layout.tensor or units % layout.tensor:
        raise ConfigError(
            f"tensor_parallel_size is {layout.tensor}, which does not divide {experts} experts of "
            f"{units} units of this {config.family} model."
        )


# ---- the part of a device ----------------------------------------------------------------------


def cut_layers(config: ModelConfig, stages: int) -> list[range]:
    """The layers of each stage in order, divided as the engine divides them."""
    return split.cut_layers(*split.layer_costs(config), stages)


def device_config(config: ModelConfig, layout: Layout, layers: range | None = None) -> ModelConfig:
    """The shapes of one device's part of the model; that of the largest if parts differ.

    Whole experts are described as shares of all experts, which have as many parameters. Only the
    first and the last stage have a vocabulary table.
    """
    size, moe = layout.tensor, config.moe
    mine = config
    if layout.own_attention and moe is not None:
        mine = replace(config, moe=replace(moe, intermediate_size=moe.intermediate_size // size))
    elif not layout.own_attention and size > 1:
        held = Split(0, size).vocabulary(config.vocab_size)
        mine = replace(rank_config(config, size), vocab_size=len(held))
    if layers is None or len(layers) == config.num_layers:
        return mine
    ends = layers.start == 0 or layers.stop == config.num_layers
    return replace(
        stage_config(mine, layers),
        vocab_size=mine.vocab_size if ends else 1,
        tie_word_embeddings=True,  # one table: the embedding or the output head
    )


def matrices_in(num_bytes: float, dtype: str = "bfloat16") -> WeightSizes:
    """Matrices of so many bytes per weight, such as 1 for FP8; vocabulary tables and norms stay in
    `dtype`."""
    names = ("attention", "mlp", "router", "experts", "shared_experts")
    parts: dict[str, Any] = dict.fromkeys(names, num_bytes)
    return replace(WeightSizes.plain(dtype), **parts)


def device_memory(
    config: ModelConfig,
    memory_bytes: int,
    layout: Layout = SINGLE_DEVICE,
    **settings: Any,
) -> MemoryPlan:
    """The `cost.memory_plan` of the device with the fewest KV cache tokens.

    All devices of a stage cache the same tokens, except with data-parallel attention.

    `settings` are arguments of `memory_plan`.
    """
    check_layout(config, layout)
    plans = [
        memory_plan(device_config(config, layout, layers), memory_bytes, **settings)
        for layers in cut_layers(config, layout.pipeline)
    ]
    return min(plans, key=lambda plan: (plan.num_tokens, plan.kv_cache_bytes))
