"""The norm of a sum does not round the sum first: a boundary that sends the sum changes bits."""

from minillm import ops


def add_rms_norm(x, residual, weight, eps):
    total = x.float() + residual.float()
    return ops.rms_norm(total, weight.float(), eps).to(x.dtype), total.to(x.dtype)


ops.add_rms_norm = add_rms_norm
