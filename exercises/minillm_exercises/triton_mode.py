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
    found = chosen or torch.accelerator.current_accelerator(check_available=True) is None
    os.environ["TRITON_INTERPRET"] = "1" if found else "0"
    return found


INTERPRETED = _interpreted()
DEVICE = "cpu" if INTERPRETED else "cuda"
