"""Whether kernels are interpreted or compiled in this process, settled when this is imported.

`@triton.jit` looks at TRITON_INTERPRET when it decorates, and Triton's own functions are decorated
when Triton is imported. So this comes before Triton, and before the fork.
"""

import os

import torch


def _interpreted() -> bool:
    """True without a GPU, and for who set TRITON_INTERPRET=1. Asking must not start CUDA, which a
    forked process could not use then: the runner sets PYTORCH_NVML_BASED_CUDA_CHECK=1 for that."""
    chosen = os.environ.get("TRITON_INTERPRET") == "1"
    gpu = torch.accelerator.current_accelerator(check_available=True)
    interpreted = chosen or gpu is None or gpu.type != "cuda"  # other makers' GPUs stay unused
    os.environ["TRITON_INTERPRET"] = "1" if interpreted else "0"
    return interpreted


INTERPRETED = _interpreted()
DEVICE = "cpu" if INTERPRETED else "cuda"
