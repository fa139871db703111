"""The public checks of e01.3: small models, one mechanism after the other, then all at once."""

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import minillm
from minillm_exercises.checking import accept, check, close, equal, expect, seeds, tensor

TINY = Path(minillm.__file__).parent / "assets" / "tiny"
LAYER = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")


def config_of(heads: int = 1, kv_heads: int = 1, dim: int = 4, **other: Any) -> dict[str, Any]:
    """The numbers of a small model."""
    made = dict(zip(LAYER, (heads, kv_heads, dim, 6), strict=True))
    rest = {"num_hidden_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 100.0, "hidden_size": 5}
    return made | rest | {"vocab_size": 11} | other


def random_model(seed: int, config: dict[str, Any], scale: float = 1.0) -> dict[str, Tensor]:
    """Weights of every name; `scale` is that of the rows of the embedding."""
    d, dim, width = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = (config[f"num_{name}_heads"] * dim for name in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
    shapes |= {"self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d)}
    shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,), "self_attn.o_proj": (d, q)}
    shapes |= {"mlp.gate_proj": (width, d), "mlp.up_proj": (width, d), "mlp.down_proj": (d, width)}
    all_shapes = {"embed_tokens": (config["vocab_size"], d), "norm": (d,)} | {
        f"layers.{i}.{n}": s for i in range(config["num_hidden_layers"]) for n, s in shapes.items()
    }
    made = {
        f"model.{name}.weight": tensor(seed + place, *shape, scale=0.7) + (len(shape) == 1)
        for place, (name, shape) in enumerate(all_shapes.items())
    }
    made["model.embed_tokens.weight"] *= scale
    return made


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of one vector, in float64."""
    return x * weight.double() / (x.square().sum() / len(x) + eps) ** 0.5


def expected(weights: dict[str, Tensor], config: dict[str, Any], ids: list[int]) -> Tensor:
    """The logits [T, V], one token and one head at a time, in float64."""
    eps, dim = config["rms_norm_eps"], config["head_dim"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    rows = [weights["model.embed_tokens.weight"][i].double() for i in ids]
    turns = torch.tensor([config["rope_theta"] ** (-2 * i / dim) for i in range(dim // 2)]).double()
    for number in range(config["num_hidden_layers"]):

        def matrix(name: str, number: int = number) -> Tensor:
            return weights[f"model.layers.{number}.{name}.weight"].double()

        def head(x: Tensor, name: str, at: int, position: int) -> Tensor:
            x = matrix(f"self_attn.{name}_proj")[at * dim : (at + 1) * dim] @ x
            if name == "v":
                return x
            x = normed(x, matrix(f"self_attn.{name}_norm"), eps)
            point = torch.complex(x[: dim // 2], x[dim // 2 :]) * torch.exp(1j * position * turns)
            return torch.cat((point.real, point.imag))

        inputs = [normed(row, matrix("input_layernorm"), eps) for row in rows]
        for position in reversed(range(len(rows))):
            out = []
            for at in range(config["num_attention_heads"]):
                query, seen = head(inputs[position], "q", at, position), range(position + 1)
                keys = torch.stack([head(inputs[p], "k", at // group, p) for p in seen])
                values = torch.stack([head(inputs[p], "v", at // group, p) for p in seen])
                out.append((keys @ query / dim**0.5).softmax(0) @ values)
            rows[position] = rows[position] + matrix("self_attn.o_proj") @ torch.cat(out)
        for position, row in enumerate(rows):
            x = normed(row, matrix("post_attention_layernorm"), eps)
            gate = matrix("mlp.gate_proj") @ x
            opened = gate / (1 + torch.exp(-gate)) * (matrix("mlp.up_proj") @ x)
            rows[position] = row + matrix("mlp.down_proj") @ opened
    last = torch.stack([normed(row, weights["model.norm.weight"], eps) for row in rows])
    return (last @ weights["model.embed_tokens.weight"].double().T).float()


def logits(impl: Any, weights: dict[str, Tensor], config: dict[str, Any], ids: list[int]) -> Any:
    """What `forward` returns; the weights are as they were."""
    before = {name: weight.clone() for name, weight in weights.items()}
    got = accept(impl.forward(weights, dict(config), list(ids)), "forward returns a Tensor")
    for name, weight in before.items():
        expect(torch.equal(weights.get(name, weight[:0]), weight), f"forward has changed {name}.")
    expect(type(got) is Tensor, f"forward returns a Tensor of logits; it returned {type(got)}.")
    expect(got.dtype == torch.float32, f"The logits are {got.dtype}; they should be float32.")
    equal(list(got.shape), [len(ids), config["vocab_size"]], "The shape of the logits, [T, V]")
    return got


def compare(impl: Any, seed: int, config: dict[str, Any], ids: list[int], case: str) -> None:
    """The logits of a random model."""
    weights = random_model(seed, config)
    got = logits(impl, weights, config, ids)
    close(got, expected(weights, config, ids), "The logits", case, rtol=1e-3, atol=1e-4)


@check(1, "One row of scores for each token")
def test_shape(impl: Any) -> None:
    """Types and shapes only."""
    config = config_of(heads=2)
    got = logits(impl, random_model(1, config), config, [3, 1, 4])
    expect(bool(got.isfinite().all()), "The logits of three tokens have NaN or infinity in them.")


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """No layer: the norm of the row, times the embedding."""
    config = config_of(num_hidden_layers=0, hidden_size=2, vocab_size=3, rms_norm_eps=12.5)
    weights = random_model(2, config)
    weights["model.embed_tokens.weight"] = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 1.0]])
    weights["model.norm.weight"] = torch.tensor([1.0, 2.0])
    got = logits(impl, weights, config, [0])
    close(got, torch.tensor([[8.2, 0.6, 1.6]]), "The logits of the example, without a layer")


@check(2, "One token")
def test_one_token(impl: Any) -> None:
    """Every weight, but no position, scale or mask."""
    compare(impl, 30, config_of(num_hidden_layers=2), [7], "one token, two layers, one head")


@check(2, "Several tokens")
def test_tokens(impl: Any) -> None:
    """One head: scale, mask and rotation."""
    compare(impl, 60, config_of(), [5, 0, 9, 5, 2], "five tokens, one layer, one head")


@check(2, "Heads that share keys and values")
def test_heads(impl: Any) -> None:
    """Four query heads on two."""
    compare(impl, 90, config_of(4, 2), [1, 8, 8, 3], "four tokens, 4 heads on 2, one layer")


@check(2, "Rows that are as small as eps")
def test_eps(impl: Any) -> None:
    """eps is inside the root, and is the model's own."""
    config = config_of(rms_norm_eps=1e-2, num_hidden_layers=1)
    weights, ids = random_model(120, config, scale=0.05), [2, 6, 1]
    want = expected(weights, config, ids)
    got = logits(impl, weights, config, ids)
    close(got, want, "The logits", "rms_norm_eps is 0.01, and rows are small", 1e-3, 1e-5)


@check(2, "A text and its beginning")
def test_beginning(impl: Any) -> None:
    """What comes later changes no earlier logits."""
    config = config_of(2, 1, num_hidden_layers=2)
    weights, ids = random_model(150, config), [4, 4, 10, 0, 7, 3]
    whole, part = (logits(impl, weights, config, ids[:n]) for n in (6, 3))
    close(whole[:3], part, "The first 3 rows of 6 tokens, beside those of 3 tokens alone")


@check(2, "Far positions, another theta")
def test_positions(impl: Any) -> None:
    """Thirty tokens: slow pairs turn, too."""
    draw = random.Random(0)
    ids = [draw.randrange(11) for _ in range(30)]
    compare(impl, 180, config_of(dim=6, rope_theta=10.0), ids, "thirty tokens, theta is 10")


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
        compare(impl, seed, config, ids, f"a random model, {len(ids)} tokens")


@check(2, "The embedded model, from its file")
def test_tiny(impl: Any) -> None:
    """Seven layers of a trained model."""
    weights = {n: w.float() for n, w in load_file(TINY / "model.safetensors").items()}
    config = config_of(4, 2, 64, num_hidden_layers=7, rope_theta=1e4, vocab_size=4096)
    ids = [0, 314, 288, 534, 727]
    got, want = logits(impl, weights, config, ids), expected(weights, config, ids)
    close(got, want, "The logits of tiny", "five tokens", rtol=1e-3, atol=1e-3)
