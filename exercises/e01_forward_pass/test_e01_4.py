"""The public checks of e01.4: frequencies, and small models of each family."""

import random
from typing import Any

from small_models import compare, config_of, speeds
from torch import Tensor

from minillm_exercises.checking import accept, check, close, expect, seeds


def scaling_of(length: int, factor: float = 8.0, low: float = 1.0, high: float = 4.0) -> Any:
    """The fields of Llama 3's scaling."""
    names = ("original_max_position_embeddings", "factor", "low_freq_factor", "high_freq_factor")
    return dict(zip(names, (length, factor, low, high), strict=True)) | {"rope_type": "llama3"}


def same_speeds(impl: Any, config: dict[str, Any], case: str) -> None:
    """What `frequencies` returns."""
    got = accept(impl.frequencies(dict(config)), "frequencies returns a Tensor", case)
    expect(type(got) is Tensor, f"frequencies returns a Tensor; it returned {type(got)}.")
    close(got, speeds(config).float(), "The frequencies", case, rtol=1e-4, atol=1e-9)


@check(1, "Frequencies without scaling")
def test_plain(impl: Any) -> None:
    """With None, and without the key."""
    config = config_of(dim=8, rope_theta=1e4)
    same_speeds(impl, config, "head_dim 8, theta 10,000, no rope_scaling")
    same_speeds(impl, config | {"rope_scaling": None}, "rope_scaling is None")


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """A pair of each kind: kept, mixed, slowed down."""
    config = config_of(dim=6, rope_theta=1000.0, rope_scaling=scaling_of(128, 8.0, 1.0, 4.0))
    same_speeds(impl, config, "the example: theta 1,000, length 128, factor 8, limits 1 and 4")


@check(2, "Frequencies of Llama 3")
def test_scaled(impl: Any) -> None:
    """Many pairs, other limits."""
    for length, theta, rest in (
        (8192, 5e5, (8.0, 1.0, 4.0)),
        (8192, 5e5, (32.0, 1.0, 4.0)),
        (64, 1e4, (4.0, 2.0, 5.0)),
    ):
        config = config_of(dim=64, rope_theta=theta, rope_scaling=scaling_of(length, *rest))
        same_speeds(impl, config, f"theta {theta:g}, length {length}, factor and limits {rest}")


@check(2, "A Llama: nothing but matrices and norms of rows")
def test_llama(impl: Any) -> None:
    """No optional part."""
    compare(impl, 30, config_of(4, 2, num_hidden_layers=2), [5, 0, 9, 5], "a Llama, four tokens")


@check(2, "A matrix of its own for the logits")
def test_head(impl: Any) -> None:
    """Untied."""
    compare(impl, 60, config_of(2, 1), [5, 0, 9], "a Llama with lm_head", "head")


@check(2, "Biases, as in Qwen2")
def test_biases(impl: Any) -> None:
    """On q, k and v."""
    compare(impl, 90, config_of(4, 2), [1, 8, 8, 3], "a Qwen2, four tokens", "biases")


@check(2, "Norms of heads, as in Qwen3")
def test_norms(impl: Any) -> None:
    """As e01.3."""
    compare(impl, 120, config_of(4, 2), [1, 8, 8, 3], "a Qwen3, four tokens", "norms")


@check(2, "The rotation of Llama 3, in a text")
def test_llama3(impl: Any) -> None:
    """Far positions, with slow pairs that are slower."""
    draw = random.Random(0)
    config = config_of(2, 1, 8, rope_scaling=scaling_of(16, 4.0))
    compare(impl, 150, config, [draw.randrange(11) for _ in range(24)], "a Llama 3, 24 tokens")


@check(2, "Any of these parts")
def test_random(impl: Any) -> None:
    """Combinations."""
    for seed in seeds(4):
        draw = random.Random(seed)
        parts = [part for part in ("biases", "norms", "head") if draw.random() < 0.5]
        kv_heads = draw.randint(1, 2)
        config = config_of(
            kv_heads * draw.randint(1, 3), kv_heads, 2 * draw.randint(1, 3),
            num_hidden_layers=draw.randint(1, 2),
            rope_scaling=scaling_of(draw.randint(8, 64)) if draw.random() < 0.5 else None,
        )  # fmt: skip
        ids = [draw.randrange(11) for _ in range(draw.randint(2, 6))]
        compare(impl, seed, config, ids, f"a model with {', '.join(parts) or 'no part'}", *parts)
