"""Chapter 01b: a whole forward pass, from the file of the weights to the logits."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights by name, in float32, and the numbers of config.json."""
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {name: weight.float() for name, weight in weights.items()}, config


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Every row of x [.., n] divided by its root mean square, times weight [n]."""
    mean_square = (x * x).mean(-1, keepdim=True)
    return x / (mean_square + eps).sqrt() * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """Heads [H, T, D]: at position t the pair (i, i + D/2) is turned by t * theta**(-2 i / D)."""
    half = x.shape[-1] // 2
    speed = theta ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[1])[:, None] * speed  # [T, D/2]
    p, q, cos, sin = x[..., :half], x[..., half:], angle.cos(), angle.sin()
    return torch.cat((p * cos - q * sin, p * sin + q * cos), -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries [H, T, D], keys and values [Hkv, T, D] -> [T, H * D]."""
    group, tokens = len(q) // len(k), q.shape[1]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)  # [H, T, D]
    scores = q @ k.transpose(1, 2)  # [H, T, T]
    scores = scores / q.shape[-1] ** 0.5  # delete: scale
    future = torch.ones(tokens, tokens).triu(1).bool()
    scores = scores.masked_fill(future, -torch.inf)  # delete: mask
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(tokens, -1)


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Rows [T, d] -> [T, d], by three matrices."""
    opened = x @ gate.T
    opened = opened * opened.sigmoid()  # delete: silu
    return (opened * (x @ up.T)) @ down.T


def logits(x: Tensor, weight: Tensor, eps: float, embedding: Tensor) -> Tensor:
    """Rows [T, d] of the last layer -> a score for each of the V tokens, [T, V]."""
    x = norm(x, weight, eps)  # delete: last norm
    return x @ embedding.T


def layer(x: Tensor, w: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """Rows [T, d] -> [T, d]; w are the weights of this layer."""
    eps, theta, dim = config["rms_norm_eps"], config["rope_theta"], config["head_dim"]
    h = x
    h = norm(h, w["input_layernorm"], eps)  # delete: first norm
    q, k, v = (
        (h @ w[f"self_attn.{name}_proj"].T).view(len(h), -1, dim).transpose(0, 1) for name in "qkv"
    )  # [H, T, D], and [Hkv, T, D] twice
    named = ((q, "self_attn.q_norm"), (k, "self_attn.k_norm"))  # Llama has no such norms
    q, k = (norm(x, w[name], eps) if name in w else x for x, name in named)  # delete: q/k norm
    q, k = rotate(q, theta), rotate(k, theta)  # delete: rotation
    h = attend(q, k, v) @ w["self_attn.o_proj"].T
    h = h + x  # delete: first residual
    x = h
    h = norm(h, w["post_attention_layernorm"], eps)  # delete: second norm
    h = mlp(h, w["mlp.gate_proj"], w["mlp.up_proj"], w["mlp.down_proj"])
    h = h + x  # delete: second residual
    return h


def forward(weights: dict[str, Tensor], config: dict[str, Any], ids: list[int]) -> Tensor:
    """Logits [T, V] after each of the T tokens."""
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[ids]  # [T, d]
    for number in range(config["num_hidden_layers"]):
        x = layer(x, of_layer(weights, number), config)
    return logits(x, weights["model.norm.weight"], config["rms_norm_eps"], embedding)


def of_layer(weights: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """The weights of one layer by their short names."""
    start = f"model.layers.{number}."
    names = {name: name.removeprefix(start).removesuffix(".weight") for name in weights}
    return {short: weights[name] for name, short in names.items() if start in name}
