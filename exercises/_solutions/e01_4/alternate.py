"""e01.4 another way: wavelengths in three cases; missing weights are zeros, ones or None."""

import math
from typing import Any

import torch
from torch import Tensor


def scaled(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of a vector, or of the rows of a matrix."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def frequencies(config: dict[str, Any]) -> Tensor:
    """One pair after the other, by its wavelength."""
    found = []
    for i in range(config["head_dim"] // 2):
        f = config["rope_theta"] ** (-2 * i / config["head_dim"])
        if (s := config.get("rope_scaling")) is not None:
            wave, length = 2 * math.pi / f, s["original_max_position_embeddings"]
            low, high = s["low_freq_factor"], s["high_freq_factor"]
            if wave > length / low:
                f = f / s["factor"]
            elif wave >= length / high:
                smooth = (length / wave - low) / (high - low)
                f = (1 - smooth) * f / s["factor"] + smooth * f
        found.append(f)
    return torch.tensor(found)


def turned(heads: Tensor, position: int, speed: Tensor) -> Tensor:
    """Heads [H, D] of one token, whose pairs are complex numbers."""
    half = heads.shape[1] // 2
    points = torch.complex(heads[:, :half], heads[:, half:])
    points = points * torch.polar(torch.ones(half), position * speed)
    return torch.cat((points.real, points.imag), 1)


def forward(weights: dict[str, Tensor], config: dict[str, Any], ids: list[int]) -> Tensor:
    """The logits [T, V]."""
    dim, eps, speed = config["head_dim"], config["rms_norm_eps"], frequencies(config)
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
            q, k, v = (
                (w[f"self_attn.{n}_proj"] @ h + w.get(f"self_attn.{n}_proj.bias", 0)).view(-1, dim)
                for n in "qkv"
            )
            if "self_attn.q_norm" in w:
                q = scaled(q, w["self_attn.q_norm"], eps)
                k = scaled(k, w["self_attn.k_norm"], eps)
            keys[number].append(turned(k, position, speed))
            values[number].append(v)
            every_key, every_value = torch.stack(keys[number], 1), torch.stack(values[number], 1)
            out = []
            for head, query in enumerate(turned(q, position, speed)):
                weight = (every_key[head // group] @ query / math.sqrt(dim)).softmax(0)
                out.append(weight @ every_value[head // group])
            x = x + w["self_attn.o_proj"] @ torch.cat(out)
            h = scaled(x, w["post_attention_layernorm"], eps)
            opened = torch.nn.functional.silu(w["mlp.gate_proj"] @ h)
            x = x + w["mlp.down_proj"] @ (opened * (w["mlp.up_proj"] @ h))
        rows.append(scaled(x, weights["model.norm.weight"], eps))
    head = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    return torch.stack(rows) @ weights[head].T
