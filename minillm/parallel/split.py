"""Which part of a model each of n ranks holds (tensor parallelism; Shoeybi et al., 2019, 3).

Counting only, without torch, for the loader and the cost model.

    q, gate, up     rows     [r H/n, (r+1) H/n)  heads or units of rank r; no communication before
    k, v            rows     its KV heads; where there are more ranks than KV heads, ranks share one
    o, down         columns  the same heads or units; the products are parts of a sum
    embedding, head rows     a share of the vocabulary in blocks of 64
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from minillm.config import PER_LAYER, ModelConfig, unknown_fields
from minillm.errors import ConfigError
from minillm.parallel.placement import check_redundant
from minillm.plan.parameters import layer_products

MOST_RANKS = 64
DECODE_ROWS = 32  # of the decode step for which costs of layers are compared
VOCABULARY_BLOCK = 64  # token ids whose sampling noise is drawn together


@dataclass(frozen=True)
class Split:
    """Rank `rank` of `size`."""

    rank: int
    size: int

    def share(self, total: int) -> range:
        """An equal share of `total` rows, columns or heads, which `size` divides."""
        each = total // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def kv_heads(self, num_kv_heads: int) -> range:
        """The KV heads that this rank's query heads use; with more ranks than heads, neighbouring
        ranks hold the same head."""
        if self.size <= num_kv_heads:
            return self.share(num_kv_heads)
        head = self.rank // (self.size // num_kv_heads)
        return range(head, head + 1)

    def vocabulary(self, vocab_size: int) -> range:
        """A share of the token ids in whole blocks of 64; the last ranks may have fewer or none."""
        each = self.most_tokens(vocab_size)
        return range(min(self.rank * each, vocab_size), min((self.rank + 1) * each, vocab_size))

    def most_tokens(self, vocab_size: int) -> int:
        """The number of token ids of the first rank, which has the most."""
        return -(-vocab_size // (self.size * VOCABULARY_BLOCK)) * VOCABULARY_BLOCK


@dataclass(frozen=True)
class Stage:
    """Stage `index` of `count` of a pipeline: consecutive layers."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the last norm and the output matrix, and samples."""
        return self.index == self.count - 1

    def layers(self, config: ModelConfig) -> range:
        """The layers that it computes."""
        return cut_layers(*layer_costs(config), self.count)[self.index]


def layer_costs(config: ModelConfig) -> tuple[list[float], float]:
    """Weights of each layer, and of the output matrix, that a decode step reads."""
    products = [layer_products(config, layer) for layer in range(config.num_layers)]
    layers = [sum(product.parameters_read(DECODE_ROWS) for product in some) for some in products]
    return layers, config.vocab_size * config.hidden_size


def cut_layers(costs: Sequence[float], output_cost: float, count: int) -> list[range]:
    """Cut layers into `count` stages of one or more layers, minimising the cost of the most
    expensive stage; the last one includes the output matrix."""
    before = [0.0, *accumulate(costs)]
    end = len(costs)
    # From the end: for each first layer, the cost of the most expensive stage, and the first cut.
    best = [(before[end] - before[first] + output_cost, end) for first in range(end)]
    cuts = [best]
    for stages in range(2, count + 1):
        later = best
        best = [
            min(
                (max(before[cut] - before[first], later[cut][0]), cut)
                for cut in range(first + 1, end - stages + 2)
            )
            for first in range(end - stages + 1)
        ]
        cuts.append(best)
    spans, first = [], 0
    for best in reversed(cuts):
        spans.append(range(first, best[first][1]))
        first = best[first][1]
    return spans


def share_of_experts(config: ModelConfig, copies: int, spares: int = 0) -> ModelConfig:
    """The shapes of one of several copies that share the experts of a model and `spares` copies."""
    moe = config.moe
    if moe is None or (moe.num_experts + spares) % copies:
        count = moe.num_experts if moe else 0
        sizes = ", ".join(str(size) for size in range(2, count + 1) if not count % size)
        raise ConfigError(
            f"data_parallel_size is {copies}, which does not divide {count} experts of this "
            f"{config.family} model; with enable_expert_parallel it can be {sizes}."
        )
    slots, total = moe.num_experts + spares, moe.num_experts * copies
    units = -(-moe.intermediate_size * slots // total)
    return replace(config, moe=replace(moe, intermediate_size=units))


def check_stages(config: ModelConfig, count: int) -> None:
    """ConfigError unless each of `count` stages has a layer."""
    if count > config.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {count}; it must be at most {config.num_layers}, the "
            f"layers of this {config.family} model."
        )


def largest_part(
    config: ModelConfig,
    size: int,
    stages: int,
    whole_experts: bool = False,
    copies: int = 1,
    spares: int = 0,
) -> ModelConfig:
    """The shapes of the rank that needs the most memory. A share of all experts, and of `spares`
    copies, has the size of a share of each; `copies` of the model may share experts (data
    parallelism). ConfigError where the model cannot be cut like this."""
    if config.moe is not None and spares:
        check_redundant(config.moe.num_experts, size * copies, spares)
    check_split(config, size, whole_experts, spares)
    check_stages(config, stages)
    cuts = [Stage(index, stages).layers(config) for index in range(stages)]
    if whole_experts and (copies > 1 or spares):
        config = share_of_experts(config, copies, spares)
    return stage_config(rank_config(config, size), max(cuts, key=len))


def stage_config(config: ModelConfig, layers: range) -> ModelConfig:
    """The shapes of a stage of these layers."""
    own = slice(layers.start, layers.stop)
    cut = {name: getattr(config, name)[own] for name in PER_LAYER}
    return replace(config, num_layers=len(layers), **cut)


def why_not(config: ModelConfig, size: int, whole_experts: bool = False, spares: int = 0) -> str:
    """Which dimension of a model `size` ranks do not divide; empty if they divide all."""
    sizes = {"{} attention heads": config.num_heads}
    if not config.mla and size % config.num_kv_heads:  # else ranks share a head
        sizes["{} KV heads"] = config.num_kv_heads
    if not all(map(config.is_moe_layer, range(config.num_layers))):
        sizes["intermediate size {}"] = config.intermediate_size
    if config.moe is not None and whole_experts:
        sizes["{} experts"] = config.moe.num_experts + spares
    elif config.moe is not None:
        sizes["intermediate size {} of the experts"] = config.moe.intermediate_size
    if config.moe is not None:
        shared = config.moe.shared_intermediate_size
        sizes["intermediate size {} of the shared experts"] = shared
    wrong = [text.format(total) for text, total in sizes.items() if total % size]
    return wrong[0] if wrong else ""


def check_split(
    config: ModelConfig, size: int, whole_experts: bool = False, spares: int = 0
) -> None:
    """ConfigError, which lists the possible sizes, unless a model can be split among `size`
    ranks."""
    if whole_experts and config.moe is None:
        raise ConfigError(
            f"enable_expert_parallel needs a model with experts, which this {config.family} model "
            "does not have; leave it out."
        )
    if size > 1 and (names := unknown_fields(config)):
        raise ConfigError(
            f"tensor_parallel_size is {size}; this {config.family} model has {', '.join(names)}, "
            "which ranks cannot share; use 1, with pipeline_parallel_size or data_parallel_size."
        )
    more = whole_experts, spares
    if why := why_not(config, size, *more):
        every = range(1, MOST_RANKS + 1)
        sizes = ", ".join(str(each) for each in every if not why_not(config, each, *more))
        raise ConfigError(
            f"tensor_parallel_size is {size}, which does not divide {why} of this "
            f"{config.family} model; it can be {sizes}."
        )


def rank_config(config: ModelConfig, size: int, whole_experts: bool = False) -> ModelConfig:
    """The shapes of one rank's layers: a share of the heads and units. The vocabulary is the
    model's, because every rank samples from all tokens; with `whole_experts`, experts keep their
    units."""
    if size == 1:
        return config
    moe = config.moe
    if moe is not None:
        moe = replace(
            moe,
            intermediate_size=moe.intermediate_size // (1 if whole_experts else size),
            shared_intermediate_size=moe.shared_intermediate_size // size,
        )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(config.num_kv_heads // size, 1),
        intermediate_size=max(config.intermediate_size // size, 1),
        moe=moe,
    )
