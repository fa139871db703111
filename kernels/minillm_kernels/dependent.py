"""Programmatic dependent launch: a kernel begins before the one before it has ended.

Between two kernels a GPU drains, launches and fills its memory pipeline again. On sm_90 and newer a
kernel may be launched as soon as every program of its predecessor runs; it must wait before it
reads what the predecessor writes (CUDA C++ Programming Guide, "Programmatic Dependent Launch").
Weights are written by no kernel of a step, so a product prefetches its first ones meanwhile.

Off until a GPU has measured it. Triton's interpreter does not have it.
"""

from minillm_kernels.launch import arch, tl, triton

DEPENDENT = False  # the default of all launches
LINE = tl.constexpr(64)  # numbers of 16 bits in a line of the cache
OLDEST = 90


@triton.jit
def wait_for_inputs(
    weight_ptr, weight_stride, out, here, begin, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Prefetch `COLUMNS` of the rows `out` of W to the L2 cache, allow the next kernel to begin,
    and wait until the kernels before have ended. Nothing but W is read before this, and nothing is
    written."""
    LINES: tl.constexpr = (COLUMNS + LINE - 1) // LINE  # Triton 3.6 takes no `tl.cdiv` here
    column = tl.minimum(begin + tl.arange(0, LINES) * LINE, SIZE - 1)
    rows = weight_ptr + tl.where(here, out, 0).to(tl.int64)[:, None] * weight_stride
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [rows + column[None, :]], tl.int32, False, 1
    )
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


def launch_options(dependent: bool) -> dict[str, bool]:
    """Keyword arguments of a launch of a kernel with a constant `DEPENDENT`."""
    if dependent and arch() >= OLDEST:
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}
