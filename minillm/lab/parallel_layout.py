"""How a model lies on several devices: shares of layers, stages of layers, whole experts.

    tensor          n devices hold 1/n of every layer: heads, units, token ids
    pipeline        p stages hold some of the layers each
    whole experts   each of the n devices holds E/n experts instead of 1/n of every expert
    own attention   each of the n devices has its own sequences, the whole attention and E/n experts

What a device holds is a small model of its own (`device_config`), so the formulas of `plan/cost.py`
count its weights, cache and steps as they count those of any model.
"""

from dataclasses import dataclass, replace
from typing import Any

from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.parallel import split
from minillm.parallel.split import Split, check_split, check_stages, rank_config, stage_config
from minillm.plan.cost import MemoryPlan, dtype_bytes, memory_plan
from minillm.plan.parameters import all_products


@dataclass(frozen=True)
class Layout:
    """How a model lies on devices.

    Attributes:
        tensor: devices that share a layer (n).
        pipeline: stages, each with some of the layers and `tensor` devices (p).
        expert_parallel: experts are whole, each on one device.
        own_attention: devices share the experts only (data-parallel attention).
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
                "Devices with an attention of their own share nothing but whole experts; set "
                "expert_parallel, too."
            )

    @property
    def devices(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline


ALONE = Layout()


def check_layout(config: ModelConfig, layout: Layout) -> None:
    """ConfigError unless a model can lie so; it says what can."""
    if not layout.own_attention:
        check_split(config, layout.tensor)
    check_stages(config, layout.pipeline)
    if not layout.expert_parallel:
        return
    if config.moe is None:
        raise ConfigError(
            f"This {config.family} model has no experts to spread; leave expert parallelism out."
        )
    experts, units = config.moe.num_experts, config.moe.intermediate_size
    if experts % layout.tensor or units % layout.tensor:
        raise ConfigError(
            f"tensor_parallel_size is {layout.tensor}, which does not divide {experts} experts of "
            f"{units} units of this {config.family} model."
        )


# ---- what a device holds -----------------------------------------------------------------------


def cut_layers(config: ModelConfig, stages: int) -> list[range]:
    """Layers of each stage, in order, as the engine cuts them."""
    return split.cut_layers(*split.layer_costs(config), stages)


def device_config(config: ModelConfig, layout: Layout, layers: range | None = None) -> ModelConfig:
    """The shapes of what one device holds; of several, the one with the most.

    Whole experts and shares of all of them have equally many parameters, so both are written as
    shares. A stage has a table of the vocabulary only if it is the first or the last.
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
        tie_word_embeddings=True,  # one table, whichever it is
    )


def device_memory(
    config: ModelConfig,
    memory_bytes: int,
    layout: Layout = ALONE,
    *,
    weight_size: float | None = None,
    **settings: Any,
) -> MemoryPlan:
    """The plan of the device with the least room, as `cost.memory_plan` makes it for one.

    Args:
        weight_size: bytes of a weight of a product, such as 1 for FP8; tables of the vocabulary and
            norms keep the dtype (default: they all do).
        settings: those of `memory_plan`.

    Every device of a stage caches the same tokens, except with an attention of its own.
    """
    check_layout(config, layout)
    plans = []
    for layers in cut_layers(config, layout.pipeline):
        mine, saved = device_config(config, layout, layers), 0
        if weight_size is not None:
            value_bytes = dtype_bytes(settings.get("dtype") or config.dtype)
            stored = sum(each.parameters for each in all_products(mine))
            saved = round(stored * (value_bytes - weight_size))
        plans.append(memory_plan(mine, memory_bytes, copied_weight_bytes=-saved, **settings))
    return min(plans, key=lambda plan: (plan.num_tokens, plan.kv_cache_bytes))
