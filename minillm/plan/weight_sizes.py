"""Bytes of a model's weights in each of its parts, which may be quantised."""

from dataclasses import dataclass, fields

from minillm.config import DTYPE_BYTES, ModelConfig
from minillm.errors import ConfigError, did_you_mean
from minillm.plan.parameters import all_products, norm_parameters, parameter_count


def dtype_bytes(dtype: str) -> int:
    """Bytes of one value of `dtype`, a name of `config.DTYPE_BYTES`."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"dtype is {dtype!r}; supported are {', '.join(DTYPE_BYTES)}."
            f"{did_you_mean(dtype, DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of one weight in each part of a model: the mean over the part, with scales and zero
    points. The parts are those of `ParameterCount`; `models/weight_sizes.py` measures them.

    `products` is the type in which quantised matrices are multiplied: "int8" if activations are
    rounded, too, else None for the type of the activations.
    """

    name: str
    embedding: float
    attention: float
    mlp: float
    router: float
    experts: float
    shared_experts: float
    norms: float
    lm_head: float
    products: str | None = None

    @classmethod
    def plain(cls, dtype: str) -> "WeightSizes":
        """Weights that are all stored in `dtype`."""
        return cls(dtype, products=None, **dict.fromkeys(PARTS, dtype_bytes(dtype)))

    def total(self, config: ModelConfig) -> int:
        """Bytes of all weights of a model."""
        count = parameter_count(config)
        return round(sum(getattr(self, part) * getattr(count, part) for part in PARTS))

    def read(self, config: ModelConfig, num_tokens: int, num_logits: int) -> int:
        """Bytes of the weights that a step reads: every matrix once, of experts those that its
        tokens are expected to choose, of the embedding one row per token."""
        total = sum(times * getattr(self, p.part) * p.parameters_read(num_tokens)
                    for p, times in all_products(config).items())  # fmt: skip
        total += self.norms * norm_parameters(config)
        total += self.embedding * num_tokens * config.hidden_size
        if num_logits:
            head = self.embedding if config.tie_word_embeddings else self.lm_head
            total += head * config.vocab_size * config.hidden_size
        return round(total)


PARTS = tuple(field.name for field in fields(WeightSizes) if field.name not in ("name", "products"))
