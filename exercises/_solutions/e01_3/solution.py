"""Forty lines are a whole model. Where they are wrong, it is nearly always in four places.

The halves of a head are the coordinates of its points (i, i + D/2), not neighbours (2i, 2i + 1).
Query heads that share a key-value head are neighbours (0, 0, 1, 1), not dealt in turn. eps is
inside the root. And every part reads a norm of the rows, but adds its result to the rows.
What is wrong with positions, scale or mask does not show for one token. Compare several.
"""

from typing import Any

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row over its root mean square."""
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """[H, T, D]: the pair (i, i + D/2) at position t is turned by t * theta**(-2 i / D)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    p, q = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((p * cos - q * sin, p * sin + q * cos), -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[H, T, D] and [Hkv, T, D] twice -> [T, H * D]."""
    group, tokens = len(q) // len(k), q.shape[1]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2)
    scores = scores / q.shape[-1] ** 0.5
    future = torch.ones(tokens, tokens).triu(1).bool()
    scores = scores.masked_fill(future, -torch.inf)
    out = scores.softmax(-1) @ v  # [H, T, D]
    return out.transpose(0, 1).reshape(tokens, -1)


def forward(weights: dict[str, Tensor], config: dict[str, Any], ids: list[int]) -> Tensor:
    """The logits [T, V]."""
    eps, theta, dim = config["rms_norm_eps"], config["rope_theta"], config["head_dim"]
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[ids]  # [T, d]

    def heads(h: Tensor, name: str) -> Tensor:
        return (h @ weights[name].T).view(len(h), -1, dim).transpose(0, 1)

    for number in range(config["num_hidden_layers"]):
        start = f"model.layers.{number}."
        self_attn, mlp = f"{start}self_attn.", f"{start}mlp."
        h = x
        h = norm(h, weights[f"{start}input_layernorm.weight"], eps)
        q, k, v = (heads(h, f"{self_attn}{name}_proj.weight") for name in "qkv")
        q = norm(q, weights[f"{self_attn}q_norm.weight"], eps)
        k = norm(k, weights[f"{self_attn}k_norm.weight"], eps)
        q = rotate(q, theta)
        k = rotate(k, theta)
        h = attend(q, k, v) @ weights[f"{self_attn}o_proj.weight"].T
        x = x + h
        h = x
        h = norm(h, weights[f"{start}post_attention_layernorm.weight"], eps)
        gate = h @ weights[f"{mlp}gate_proj.weight"].T
        gate = gate * gate.sigmoid()
        h = (gate * (h @ weights[f"{mlp}up_proj.weight"].T)) @ weights[f"{mlp}down_proj.weight"].T
        x = x + h
    x = norm(x, weights["model.norm.weight"], eps)
    return x @ embedding.T
