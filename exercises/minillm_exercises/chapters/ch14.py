"""Chapter 14: what calibration sees, and how far a rounded matrix is from the exact one."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minillm.layers.linear import Linear
from minillm.quantization.methods import install
from minillm.quantization.panels import pack_quantized
from minillm.quantization.quantized import Quantized
from minillm.quantization.statistics import InputStatistics, output_error

Statistics = Mapping[str, InputStatistics]
FIELDS = ("input_ids", "attention_mask")  # what a GPTQ package asks each example for
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


def int8_inputs(x: Tensor, scales: Tensor, by_token: bool) -> Tensor:
    """Inputs divided by `scales`, rounded to int8 with one step (or one for each token), and
    multiplied again."""
    divided = x / scales
    largest = divided.abs().amax(-1, keepdim=True) if by_token else divided.abs().max()
    step = largest / 127
    return (divided / step).round() * step * scales


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


def num_fields(example: Any) -> int:
    """How many of `FIELDS` a calibration example returns by name."""
    found = 0
    for name in FIELDS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch takes a string for a sequence
                example[name]
        except (IndexError, KeyError, TypeError):
            continue
        found += 1
    return found
