"""Selects the backend of operations by the device of their tensors.

    cpu         C functions (`cpu`), or plain torch if they cannot be built
    triton      Triton kernels, on NVIDIA GPUs of compute capability 8.0 or newer
    reference   plain torch, on other GPUs

Triton's interpreter is used in tests only and is never selected here.
"""

from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from minillm.plan import machine

OLDEST = (8, 0)  # Ampere; the same as in minillm_kernels.launch, which imports Triton
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Backend(NamedTuple):
    """A backend, and the reason why it was selected."""

    name: Literal["cpu", "reference", "triton"]
    why: str


@cache
def backend_of(device: torch.device) -> Backend:
    """The backend of a device (cached)."""
    if device.type == "cpu":
        return Backend("cpu", "")  # `explain` gives details, but may compile
    if device.type != "cuda" or torch.version.hip is not None:
        return Backend("reference", "plain torch: the kernels are for NVIDIA GPUs")
    if find_spec("triton") is None:
        return Backend("reference", "plain torch: Triton is not installed")
    capability = torch.get_device_module(device).get_device_capability(device)
    if capability < OLDEST:
        here, needed = (".".join(map(str, version)) for version in (capability, OLDEST))
        return Backend(
            "reference",
            f"plain torch: compute capability {here} is older than {needed}, which the Triton "
            "kernels need",
        )
    return Backend("triton", "Triton kernels of our own")


def explain(device: torch.device) -> str:
    """Describe the backend of a device and why it was selected. On a CPU this may compile."""
    if device.type != "cpu":
        return backend_of(device).why
    from minillm.ops import cpu

    return cpu.describe(torch.bfloat16 if machine.cpu_has_bf16() else torch.float32)


def uses_kernels(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether these tensors go to a Triton kernel.

    Not if x or a weight requires a gradient, or under autocast: only torch supports these.
    """
    if backend_of(x.device).name != "triton" or x.dtype not in DTYPES:
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    if not torch.is_grad_enabled():
        return True
    return not any(tensor is not None and tensor.requires_grad for tensor in (x, *weights))
