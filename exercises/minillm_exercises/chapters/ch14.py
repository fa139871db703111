"""Chapter 14: what calibration sees, and how far a rounded matrix is from the exact one."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minillm.lab.quantise.smoothquant import smooth_scales
from minillm.lab.quantise.statistics import InputStatistics, output_error
from minillm.layers.linear import Linear
from minillm.quantization.methods import install
from minillm.quantization.panels import pack_quantized
from minillm.quantization.quantized import Quantized
from minillm_exercises.chapters.quality import Change, Subject

Statistics = Mapping[str, InputStatistics]
OUTLIER = 6.0
REAL = Path(__file__).with_name("ch14_smollm2.json")
REAL_MATRICES = ("12.qkv_proj", "9.down_proj")
BEFORE = ("qkv_proj", "gate_up_proj")  # matrices that read a norm, which can absorb scales


def statistics(inputs: Mapping[str, Tensor], tokens: int | None = None) -> Statistics:
    """What the engine's calibration records of the first `tokens` inputs of each matrix."""
    found = {}
    for name, x in inputs.items():
        found[name] = InputStatistics(x.shape[1])
        found[name].add(x[:tokens])
    return found


def relative_error(
    exact: Mapping[str, Tensor], rounded: Mapping[str, Tensor], seen: Statistics
) -> float:
    """The squared error of the outputs over the squared outputs, mean over all matrices."""
    errors = [
        float(output_error(rounded[name] - weight, seen[name].hessian))
        / float(output_error(weight, seen[name].hessian))
        for name, weight in exact.items()
    ]
    return sum(errors) / len(errors)


def int8_inputs(x: Tensor, scales: Tensor, group: int | None) -> Tensor:
    """Inputs [tokens, in] divided by `scales` [in], rounded to int8, and multiplied again. A step
    serves `group` inputs of a token, all inputs of a token (-1), or all tokens (None)."""
    divided = x / scales
    size = x.shape[-1] if group in (None, -1) else group
    groups = divided.unflatten(-1, (-1, size))
    largest = groups.abs().max() if group is None else groups.abs().amax(-1, keepdim=True)
    step = (largest / 127).clamp(min=1e-30)
    return ((groups / step).round() * step).reshape(x.shape) * scales


def outliers_apart(x: Tensor) -> Tensor:
    """LLM.int8(): large inputs stay as they are, and do not count for the step of their token."""
    large = x.abs() >= OUTLIER
    return torch.where(large, x, by_token(x.masked_fill(large, 0)))


def rotated(x: Tensor) -> Tensor:
    """Inputs in other coordinates: a large one becomes many of middle size. (The matrix would be
    rotated once, too, when it is stored.)"""
    turn = rotation(x.shape[1])
    return by_token(x @ turn) @ turn.T


def by_token(x: Tensor) -> Tensor:
    """A step for each token."""
    return int8_inputs(x, torch.ones(x.shape[1]), -1)


@cache
def rotation(size: int) -> Tensor:
    """A random orthogonal matrix."""
    normal = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    return torch.linalg.qr(normal).Q


def ways(subject: Subject, seen: Statistics) -> dict[str, Change]:
    """Ways to round the inputs of all products to 8 bits. Weights stay as they are."""
    scales = {
        name: smooth_scales(weight, seen[name])
        if name.endswith(BEFORE)
        else torch.ones(weight.shape[1])
        for name, weight in subject.weights.items()
    }
    return {
        "a step for a token": lambda name, x: by_token(x),
        "outliers apart": lambda name, x: outliers_apart(x),
        "SmoothQuant": lambda name, x: int8_inputs(x, scales[name], -1),
        "rotated": lambda name, x: rotated(x),
        "a step for 32 inputs": lambda name, x: int8_inputs(x, torch.ones(x.shape[1]), 32),
    }


def judge_ways(subject: Subject, seen: Statistics) -> dict[str, float]:
    """The KL of each of the `ways`."""
    found = ways(subject, seen)
    return {way: subject.judge(lambda _, weight: weight, how).kl for way, how in found.items()}


def measure_real(name: str) -> dict[str, Any]:
    """What `REAL` holds, for the model `name`: the largest |x| of each channel of two matrices,
    largest first, and the KL of the `ways`. Some minutes."""
    subject = Subject(name)
    seen = statistics(subject.inputs(1024))
    largest = {each: seen[each].largest.sort(descending=True).values for each in REAL_MATRICES}
    return {
        "model": name,
        "largest": {each: [float(f"{x:.3g}") for x in of] for each, of in largest.items()},
        "kl": {way: float(f"{kl:.3g}") for way, kl in judge_ways(subject, seen).items()},
    }


def real() -> dict[str, Any]:
    """`measure_real("smollm2")`, as it was measured. `make test-external` measures it again."""
    return json.loads(REAL.read_text(encoding="utf-8"))


def large_channels(x: Tensor) -> float:
    """The largest mean |x| of a channel over the mean of all."""
    mean = x.abs().mean(0)
    return float(mean.max() / mean.mean())


def correlation(x: Tensor) -> Tensor:
    """H of inputs [tokens, in] with its diagonal scaled to 1."""
    hessian = x.T @ x
    root = hessian.diagonal().sqrt()
    return hessian / torch.outer(root, root)


def product_error(quantized: Quantized, x: Tensor) -> float:
    """How far the engine's product of inputs [N, in] with a quantised matrix on this CPU is from
    the product with its dense values, relative."""
    layer = Linear("", quantized.shape[1], {"w": quantized.shape[0]})
    layer.create(torch.bfloat16, "cpu")
    install(layer, quantized, torch.bfloat16)
    pack_quantized([layer])
    with torch.inference_mode():
        found = layer(x.bfloat16()).float()
    exact = x.bfloat16().float() @ quantized.dense().T
    return float((found - exact).norm() / exact.norm())
