"""Which part of a model each of n ranks holds (tensor parallelism; Shoeybi et al., 2019, 3).

Pure numbers: a loader, a cost model and a test use the same.

    q, gate, up     rows     [r H/n, (r+1) H/n)  heads or units of rank r; no communication before
    k, v            rows     its KV heads; where there are more ranks than KV heads, ranks share one
    o, down         columns  the same heads or units; the products are parts of a sum
    embedding, head rows     a share of the vocabulary in blocks of 64
"""

from dataclasses import dataclass, replace

from minillm.config import ModelConfig
from minillm.errors import ConfigError

MOST_RANKS = 64
VOCABULARY_BLOCK = 64  # token ids whose noise is drawn together


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
        """The KV heads that this rank's query heads use: with more ranks than heads, neighbouring
        ranks hold the same head (rank // (size / heads); rank % heads would be another one's)."""
        if self.size <= num_kv_heads:
            return self.share(num_kv_heads)
        head = self.rank // (self.size // num_kv_heads)
        return range(head, head + 1)

    def vocabulary(self, vocab_size: int) -> range:
        """A share of the token ids, in whole blocks of 64; the last ranks have fewer, or none."""
        each = self.most_tokens(vocab_size)
        return range(min(self.rank * each, vocab_size), min((self.rank + 1) * each, vocab_size))

    def most_tokens(self, vocab_size: int) -> int:
        """Token ids of the first rank, which has the most."""
        return -(-vocab_size // (self.size * VOCABULARY_BLOCK)) * VOCABULARY_BLOCK


def divides(config: ModelConfig, size: int) -> bool:
    """Whether a model can be split among so many ranks."""
    return not why_not(config, size)


def why_not(config: ModelConfig, size: int) -> str:
    """Which of a model's numbers cannot be split among so many ranks; empty if all can."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size:
        return f"{heads} attention heads"
    if not config.mla and max(kv_heads, size) % min(kv_heads, size):
        return f"{kv_heads} KV heads"
    dense = config.moe is None or not all(map(config.is_moe_layer, range(config.num_layers)))
    if dense and config.intermediate_size % size:
        return f"intermediate size {config.intermediate_size}"
    moe = config.moe
    if moe is not None and moe.intermediate_size % size:
        return f"intermediate size {moe.intermediate_size} of the experts"
    if moe is not None and moe.shared_intermediate_size % size:
        return f"intermediate size {moe.shared_intermediate_size} of the shared experts"
    return ""


def check_split(config: ModelConfig, size: int) -> None:
    """ConfigError unless a model can be split among so many ranks; it lists the sizes that can."""
    if why := why_not(config, size):
        sizes = ", ".join(str(each) for each in range(1, MOST_RANKS + 1) if divides(config, each))
        raise ConfigError(
            f"tensor_parallel_size is {size}, which does not divide {why} of this "
            f"{config.family} model; it can be {sizes}."
        )


def rank_config(config: ModelConfig, size: int) -> ModelConfig:
    """The shapes of one rank's layers: fewer heads and units, everything else as in the model. The
    vocabulary is the model's, because every rank chooses among all tokens."""
    if size == 1:
        return config
    moe = config.moe
    if moe is not None:
        moe = replace(
            moe,
            intermediate_size=moe.intermediate_size // size,
            shared_intermediate_size=moe.shared_intermediate_size // size,
        )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(config.num_kv_heads // size, 1),
        intermediate_size=max(config.intermediate_size // size, 1),
        moe=moe,
    )
