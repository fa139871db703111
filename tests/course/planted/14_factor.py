"""GPTQ takes the Cholesky factor of H instead of that of its inverse."""

import torch

from minillm.quantization import gptq as module


def inverse_factor(hessian, damp):
    damped = hessian.double()
    damped.diagonal().add_(damp * float(damped.diagonal().mean()))
    return torch.linalg.cholesky(damped, upper=True).to(hessian.dtype)


module.inverse_factor = inverse_factor
