"""Small models for the checks of e01.3 and e01.4, and what they compute, in float64."""

import math
from typing import Any

import torch
from torch import Tensor

from minillm_exercises.checking import accept, close, equal, expect, tensor

LAYER = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")


def config_of(heads: int = 1, kv_heads: int = 1, dim: int = 4, **other: Any) -> dict[str, Any]:
    """The numbers of a small model."""
    made = dict(zip(LAYER, (heads, kv_heads, dim, 6), strict=True))
    rest = {"num_hidden_layers": 1, "rms_norm_eps": 1e-6, "rope_theta": 100.0, "hidden_size": 5}
    return made | rest | {"vocab_size": 11} | other


def random_model(seed: int, config: dict[str, Any], *parts: str) -> dict[str, Tensor]:
    """Weights of a Llama, and of these parts: biases, norms, head."""
    d, dim, width = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = (config[f"num_{name}_heads"] * dim for name in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
    shapes |= {"self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d)}
    shapes |= {"self_attn.o_proj": (d, q)}
    if "norms" in parts:
        shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    shapes |= {"mlp.gate_proj": (width, d), "mlp.up_proj": (width, d), "mlp.down_proj": (d, width)}
    all_shapes = {"embed_tokens": (config["vocab_size"], d), "norm": (d,)} | {
        f"layers.{i}.{n}": s for i in range(config["num_hidden_layers"]) for n, s in shapes.items()
    }
    made = {
        f"model.{name}.weight": tensor(seed + place, *shape, scale=0.7) + (len(shape) == 1)
        for place, (name, shape) in enumerate(all_shapes.items())
    }
    for i in range(config["num_hidden_layers"] if "biases" in parts else 0):
        for at, (name, size) in enumerate({"q": q, "k": kv, "v": kv}.items()):
            made[f"model.layers.{i}.self_attn.{name}_proj.bias"] = tensor(seed + 50 + at, size)
    if "head" in parts:
        made["lm_head.weight"] = tensor(seed + 60, config["vocab_size"], d)
    return made


def speeds(config: dict[str, Any]) -> Tensor:
    """The angle per position of each pair, float64."""
    dim, scaling, found = config["head_dim"], config.get("rope_scaling"), []
    for i in range(dim // 2):
        speed = config["rope_theta"] ** (-2 * i / dim)
        if scaling:
            turns = scaling["original_max_position_embeddings"] * speed / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            kept = min(max((turns - low) / (high - low), 0.0), 1.0)
            speed *= kept + (1 - kept) / scaling["factor"]
        found.append(speed)
    return torch.tensor(found, dtype=torch.float64)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of one vector, in float64."""
    return x * weight.double() / (x.square().sum() / len(x) + eps) ** 0.5


def expected(weights: dict[str, Tensor], config: dict[str, Any], ids: list[int]) -> Tensor:
    """The logits [T, V], one token and one head at a time, in float64."""
    eps, dim = config["rms_norm_eps"], config["head_dim"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    rows = [weights["model.embed_tokens.weight"][i].double() for i in ids]
    turns = speeds(config)
    for number in range(config["num_hidden_layers"]):

        def matrix(name: str, number: int = number) -> Tensor:
            return weights[f"model.layers.{number}.{name}.weight"].double()

        def head(x: Tensor, name: str, at: int, position: int) -> Tensor:
            part, prefix = slice(at * dim, (at + 1) * dim), f"model.layers.{number}.self_attn."  # noqa: B023
            x = weights[f"{prefix}{name}_proj.weight"][part].double() @ x
            if f"{prefix}{name}_proj.bias" in weights:
                x = x + weights[f"{prefix}{name}_proj.bias"][part].double()
            if name == "v":
                return x
            if f"{prefix}{name}_norm.weight" in weights:
                x = normed(x, weights[f"{prefix}{name}_norm.weight"], eps)
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
    out = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    return (last @ weights[out].double().T).float()


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


def compare(
    impl: Any, seed: int, config: dict[str, Any], ids: list[int], case: str, *parts: str
) -> None:
    """The logits of a random model with these parts."""
    weights = random_model(seed, config, *parts)
    got = logits(impl, weights, config, ids)
    close(got, expected(weights, config, ids), "The logits", case, rtol=1e-3, atol=1e-4)
