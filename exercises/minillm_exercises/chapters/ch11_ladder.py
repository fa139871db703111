"""Chapter 11: runs the small kernels that a learner completes in the notebook."""

from typing import Any

import torch

from minillm_exercises.chapters.ch11 import DEVICE
from minillm_exercises.chapters.ch11_traffic import counting
from minillm_exercises.notebook import say
from minillm_kernels.launch import INTERPRETED


def run(
    kernel: Any, programs: int, *arguments: Any, shape: tuple[int, ...], **sizes: int
) -> torch.Tensor | None:
    """Launch so many programs of ``kernel(*arguments, out, **sizes)``, and return `out`.

    `out` has this shape and is NaN before the launch. None if the kernel writes nothing but NaN, so
    that a kernel whose body is `...` counts as not written yet. An access outside of the tensors is
    named and left out where kernels are interpreted.
    """
    out = torch.full(shape, float("nan"), device=DEVICE)
    if INTERPRETED:
        with counting() as found:
            kernel[(programs,)](*arguments, out, **sizes)
        if found.outside:
            say(f"{found.outside} accesses out of bounds. The first: {found.complaint}")
    else:
        kernel[(programs,)](*arguments, out, **sizes)
    return None if bool(out.isnan().all()) else out
