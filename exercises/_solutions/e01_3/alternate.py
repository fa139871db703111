"""e01.3 another way: token by token, with lists of keys and values, and complex numbers."""

import math
from typing import Any

import torch
from torch import Tensor


def scaled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of a vector, or of the rows of a matrix."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def turned(heads: Tensor, position: int, theta: float) -> Tensor:
    """Heads [H, D] of one token, whose pairs are complex numbers."""
    half = heads.shape[1] // 2
    angles = torch.tensor([position * theta ** (-i / half) for i in range(half)])
    points = torch.complex(heads[:, :half], heads[:, half:])
    points = points * torch.polar(torch.ones(half), angles)
    return torch.cat((points.real, points.imag), 1)


def forward(weights: dict[str, Tensor], config: dict[str, Any], ids: list[int]) -> Tensor:
    """The logits [T, V]."""
    dim, eps, theta = config["head_dim"], config["rms_norm_eps"], config["rope_theta"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    keys: list[list[Tensor]] = [[] for _ in range(config["num_hidden_layers"])]
    values: list[list[Tensor]] = [[] for _ in keys]
    rows = []
    for position, token in enumerate(ids):
        x = weights["model.embed_tokens.weight"][token]
        for number in range(len(keys)):
            w = {
                name.split(".", 3)[3].removesuffix(".weight"): weight
                for name, weight in weights.items()
                if name.startswith(f"model.layers.{number}.")
            }
            h = scaled(x, w["input_layernorm"], eps)
            q = scaled((w["self_attn.q_proj"] @ h).view(-1, dim), w["self_attn.q_norm"], eps)
            k = scaled((w["self_attn.k_proj"] @ h).view(-1, dim), w["self_attn.k_norm"], eps)
            keys[number].append(turned(k, position, theta))
            values[number].append((w["self_attn.v_proj"] @ h).view(-1, dim))
            every_key, every_value = torch.stack(keys[number], 1), torch.stack(values[number], 1)
            out = []
            for head, query in enumerate(turned(q, position, theta)):
                weight = (every_key[head // group] @ query / math.sqrt(dim)).softmax(0)
                out.append(weight @ every_value[head // group])
            x = x + w["self_attn.o_proj"] @ torch.cat(out)
            h = scaled(x, w["post_attention_layernorm"], eps)
            opened = torch.nn.functional.silu(w["mlp.gate_proj"] @ h)
            x = x + w["mlp.down_proj"] @ (opened * (w["mlp.up_proj"] @ h))
        rows.append(scaled(x, weights["model.norm.weight"], eps))
    return torch.stack(rows) @ weights["model.embed_tokens.weight"].T
