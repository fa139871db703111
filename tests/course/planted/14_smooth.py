"""SmoothQuant forgets the inputs: its scales come from the weights alone."""

import torch

from minillm.quantization import smoothquant

right = smoothquant.smooth_scales


def smooth_scales(weight, statistics, alpha=0.5):
    return (1 / weight.abs().amax(0).clamp(min=1e-5) ** (1 - alpha)) * torch.ones(1)


smoothquant.smooth_scales = smooth_scales
