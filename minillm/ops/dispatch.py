"""Which implementation an operation gets: the device of its tensors decides.

    cpu         C functions of our own (`cpu`), or plain torch where they cannot be built
    triton      our kernels, on an NVIDIA GPU of compute capability 8.0 or newer
    reference   the same plain torch, on a GPU that the kernels do not know

Interpreted Triton is for tests: nothing chooses it.
"""

from functools import cache
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from minillm.plan import machine

OLDEST = (8, 0)  # Ampere; as in minillm_kernels.launch, which needs Triton to be imported
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Backend(NamedTuple):
    """An implementation of all operations, and why a device has it."""

    name: Literal["cpu", "reference", "triton"]
    why: str


@cache
def backend_of(device: torch.device) -> Backend:
    """The backend of a device; asked once per device."""
    if device.type == "cpu":
        return Backend("cpu", "")  # `explain` says more, and takes longer
    if device.type != "cuda" or torch.version.hip is not None:
        return Backend("reference", "plain torch: the kernels are for NVIDIA GPUs")
    if find_spec("triton") is None:
        return Backend("reference", "plain torch: Triton is not installed")
    capability = torch.get_device_module(device).get_device_capability(device)
    if capability < OLDEST:
        found, needed = (".".join(map(str, each)) for each in (capability, OLDEST))
        return Backend(
            "reference",
            f"plain torch: compute capability {found} is older than {needed}, which the Triton "
            "kernels need",
        )
    return Backend("triton", "Triton kernels of our own")


def explain(device: torch.device) -> str:
    """Which path operations take on a device, and why. On a CPU this may compile."""
    if device.type != "cpu":
        return backend_of(device).why
    from minillm.ops import cpu

    return cpu.describe(torch.bfloat16 if machine.cpu_has_bf16() else torch.float32)


def uses_kernels(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether this tensor goes to a Triton kernel, with these weights.

    A gradient can only come from torch, and a weight can want one where x does not: behind frozen
    layers. Autocast mixes dtypes, which torch alone does.
    """
    if backend_of(x.device).name != "triton" or x.dtype not in DTYPES:
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    if not torch.is_grad_enabled():
        return True
    return not any(each is not None and each.requires_grad for each in (x, *weights))
