"""Dry runs: on a CPU, as if it were a GPU, with every kernel compiled and none run.

The engine takes the way of a GPU: Triton kernels, graphs, persistent rows. A launch compiles for
sm_90; what a kernel or cuBLAS would have written is zeros. A "graph" is the function again.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from minillm import ops
from minillm.engine import loop
from minillm.engine import setup as engine_setup
from minillm.execution import setup as execution_setup
from minillm.models.checkpoint import ModelSource, open_model
from minillm.models.decoder import Decoder
from minillm.ops import cpu_int8_cache, cpu_sampling, dispatch, transfers
from minillm.ops.dispatch import Backend
from minillm.parallel.split import stage_config

ARCH, LAYERS = 90, 2  # layers of a model: the others launch the same kernels
LARGE = 2**26  # bytes; the C library maps new pages for a tensor of 2**25 bytes or more


class Again:
    """A `Capture` whose replay is the function."""

    num_bytes = 0

    def __init__(self, device: object = None):
        pass

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run it once, as a warm-up does."""
        run()
        return run


def few_layers(name: Any) -> ModelSource:
    """A model, a preset cut to `LAYERS` layers."""
    source = open_model(name)
    layers = range(min(LAYERS, source.config.num_layers))
    return source if source.folder else replace(source, config=stage_config(source.config, layers))


def zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.empty` that fills with zeros. (`torch.zeros` itself calls `torch.empty` on some
    devices.) Pages of a large tensor are new and zero, and take no memory until they are used."""
    return lambda *shape, **options: (
        made if (made := make(*shape, **options)).nbytes > LARGE else made.zero_()
    )


def no_product(x: torch.Tensor, weight: torch.Tensor, bias: object = None) -> torch.Tensor:
    """A product that cuBLAS would compute."""
    return x.new_zeros(*x.shape[:-1], len(weight))


def copied(device: torch.device, *arrays: Any) -> list[torch.Tensor]:
    """`upload` as a GPU does it: views of one buffer, with the strides and alignments of these."""
    together, starts = transfers.pack(arrays)
    return transfers.unpack(torch.from_numpy(together), arrays, starts)


@contextmanager
def emulated(capability: int = ARCH) -> Iterator[list[Any]]:
    """For the block, the CPU is a GPU that compiles; yields the list of its launches."""
    from minillm_kernels.offline import compiling  # needs Triton

    backend = Backend("triton", "kernels are compiled and not run")
    changes: list[tuple[Any, str, Any]] = [
        (dispatch, "backend_of", lambda device: backend),
        (ops, "backend_of", lambda device: backend),
        (cpu_sampling, "takes", lambda *others: False),
        (cpu_int8_cache, "takes", lambda *others: False),
        (execution_setup, "packs", lambda *others: False),
        (engine_setup, "packs", lambda *others: False),
        (execution_setup, "keep_plain", lambda model: None),
        (execution_setup, "CudaCapture", Again),
        (loop, "open_model", few_layers),
        (Decoder, "initialize", lambda *others, **more: None),
        (torch.nn.functional, "linear", no_product),
        (torch, "empty", zeroed(torch.empty)),
        (torch, "empty_like", zeroed(torch.empty_like)),
    ]
    changes += [
        (module, "upload", copied)
        for module in list(sys.modules.values())
        if getattr(module, "upload", None) is transfers.upload
    ]
    with ExitStack() as patched:
        kernels = patched.enter_context(compiling(capability))
        for owner, name, value in changes:
            patched.enter_context(patch.object(owner, name, value))
        yield kernels
