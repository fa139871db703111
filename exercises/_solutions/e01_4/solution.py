"""The family's name is not needed: the file says what there is, and the configuration the speeds.

Llama 3.1 was trained on 8,192 positions and then taught to read 131,072. Fast pairs turn around
often within 8,192 positions: they tell neighbours apart and stay. A pair that does not turn around
once would meet angles that it has never seen, so it is slowed down by the factor 8. Between the two
limits the frequencies are mixed, so that none jumps. In a short text hardly anything differs: a
test of ten tokens cannot see that the scaling is missing, unless it looks at the frequencies.
"""

import math
from typing import Any

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row over its root mean square."""
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight


def frequencies(config: dict[str, Any]) -> Tensor:
    """The angle per position of each pair, [D / 2]."""
    half = config["head_dim"] // 2
    plain = config["rope_theta"] ** (-torch.arange(half) / half)
    scaling = config.get("rope_scaling")
    if not scaling:
        return plain
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)  # 1: a fast pair, which stays
    return share * plain + (1 - share) * plain / scaling["factor"]


def rotate(x: Tensor, speed: Tensor) -> Tensor:
    """[H, T, D]: the pair (i, i + D/2) at position t is turned by t * speed[i]."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * speed
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
    eps, speed, dim = config["rms_norm_eps"], frequencies(config), config["head_dim"]
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[ids]  # [T, d]

    def heads(h: Tensor, name: str) -> Tensor:
        made = h @ weights[f"{name}.weight"].T
        if f"{name}.bias" in weights:
            made = made + weights[f"{name}.bias"]
        return made.view(len(h), -1, dim).transpose(0, 1)

    for number in range(config["num_hidden_layers"]):
        start = f"model.layers.{number}."
        self_attn, mlp = f"{start}self_attn.", f"{start}mlp."
        h = x
        h = norm(h, weights[f"{start}input_layernorm.weight"], eps)
        q, k, v = (heads(h, f"{self_attn}{name}_proj") for name in "qkv")
        if f"{self_attn}q_norm.weight" in weights:
            q = norm(q, weights[f"{self_attn}q_norm.weight"], eps)
            k = norm(k, weights[f"{self_attn}k_norm.weight"], eps)
        q = rotate(q, speed)
        k = rotate(k, speed)
        h = attend(q, k, v) @ weights[f"{self_attn}o_proj.weight"].T
        x = x + h
        h = x
        h = norm(h, weights[f"{start}post_attention_layernorm.weight"], eps)
        gate = h @ weights[f"{mlp}gate_proj.weight"].T
        gate = gate * gate.sigmoid()
        h = (gate * (h @ weights[f"{mlp}up_proj.weight"].T)) @ weights[f"{mlp}down_proj.weight"].T
        x = x + h
    x = norm(x, weights["model.norm.weight"], eps)
    return x @ weights.get("lm_head.weight", embedding).T
