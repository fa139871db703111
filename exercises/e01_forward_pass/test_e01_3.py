"""The public checks of e01.3: small models, one mechanism after the other, then all at once."""

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from small_models import compare, config_of, expected, logits, random_model

import minillm
from minillm_exercises.checking import check, close, expect, seeds

TINY = Path(minillm.__file__).parent / "assets" / "tiny"


@check(1, "One row of scores for each token")
def test_shape(impl: Any) -> None:
    """Types and shapes only."""
    config = config_of(heads=2)
    got = logits(impl, random_model(1, config, "norms"), config, [3, 1, 4])
    expect(bool(got.isfinite().all()), "The logits of three tokens have NaN or infinity in them.")


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """No layer: the norm of the row, times the embedding."""
    config = config_of(num_hidden_layers=0, hidden_size=2, vocab_size=3, rms_norm_eps=12.5)
    weights = random_model(2, config, "norms")
    weights["model.embed_tokens.weight"] = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 1.0]])
    weights["model.norm.weight"] = torch.tensor([1.0, 2.0])
    got = logits(impl, weights, config, [0])
    close(got, torch.tensor([[8.2, 0.6, 1.6]]), "The logits of the example, without a layer")


@check(2, "One token")
def test_one_token(impl: Any) -> None:
    """Every weight, but no position, scale or mask."""
    compare(
        impl, 30, config_of(num_hidden_layers=2), [7], "one token, two layers, one head", "norms"
    )


@check(2, "Several tokens")
def test_tokens(impl: Any) -> None:
    """One head: scale, mask and rotation."""
    compare(impl, 60, config_of(), [5, 0, 9, 5, 2], "five tokens, one layer, one head", "norms")


@check(2, "Heads that share keys and values")
def test_heads(impl: Any) -> None:
    """Four query heads on two."""
    compare(
        impl, 90, config_of(4, 2), [1, 8, 8, 3], "four tokens, 4 heads on 2, one layer", "norms"
    )


@check(2, "Rows that are as small as eps")
def test_eps(impl: Any) -> None:
    """eps is inside the root, and is the model's own."""
    config = config_of(rms_norm_eps=1e-2, num_hidden_layers=1)
    weights, ids = random_model(120, config, "norms"), [2, 6, 1]
    weights["model.embed_tokens.weight"] *= 0.05
    want = expected(weights, config, ids)
    got = logits(impl, weights, config, ids)
    close(got, want, "The logits", "rms_norm_eps is 0.01, and rows are small", 1e-3, 1e-5)


@check(2, "A text and its beginning")
def test_beginning(impl: Any) -> None:
    """What comes later changes no earlier logits."""
    config = config_of(2, 1, num_hidden_layers=2)
    weights, ids = random_model(150, config, "norms"), [4, 4, 10, 0, 7, 3]
    whole, part = (logits(impl, weights, config, ids[:n]) for n in (6, 3))
    close(whole[:3], part, "The first 3 rows of 6 tokens, beside those of 3 tokens alone")


@check(2, "Far positions, another theta")
def test_positions(impl: Any) -> None:
    """Thirty tokens: slow pairs turn, too."""
    draw = random.Random(0)
    ids = [draw.randrange(11) for _ in range(30)]
    compare(
        impl, 180, config_of(dim=6, rope_theta=10.0), ids, "thirty tokens, theta is 10", "norms"
    )


@check(2, "Random models")
def test_random(impl: Any) -> None:
    """Every shape."""
    for seed in seeds(4):
        draw = random.Random(seed)
        kv_heads, dim = draw.randint(1, 3), 2 * draw.randint(1, 3)
        config = config_of(
            kv_heads * draw.randint(1, 3), kv_heads, dim, hidden_size=draw.randint(3, 9),
            num_hidden_layers=draw.randint(1, 3), rope_theta=draw.choice((10.0, 1e4)),
        )  # fmt: skip
        ids = [draw.randrange(11) for _ in range(draw.randint(2, 6))]
        compare(impl, seed, config, ids, f"a random model, {len(ids)} tokens", "norms")


@check(2, "The embedded model, from its file")
def test_tiny(impl: Any) -> None:
    """Seven layers of a trained model."""
    weights = {n: w.float() for n, w in load_file(TINY / "model.safetensors").items()}
    config = config_of(4, 2, 64, num_hidden_layers=7, rope_theta=1e4, vocab_size=4096)
    ids = [0, 314, 288, 534, 727]
    got, want = logits(impl, weights, config, ids), expected(weights, config, ids)
    close(got, want, "The logits of tiny", "five tokens", rtol=1e-3, atol=1e-3)
