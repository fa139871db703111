"""Programmatic dependent launch, compiled: the interpreter does not have it."""

import re
from functools import partial
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from minillm_kernels import dependent, gemv
from minillm_kernels.offline import compiling, inspect

BF16 = torch.bfloat16
READS = re.compile(r"\b(?:ld\.global|cp\.async\.c|st\.global|atom\.)")
KERNELS = {1: "_one_row", 8: "_several_rows", 64: "_several_rows"}


def compiled(rows: int, capability: int, **options: bool) -> Any:
    x, weight = torch.empty(rows, 1024, dtype=BF16), torch.empty(4096, 1024, dtype=BF16)
    with compiling(capability) as found:
        gemv.norm_linear(x, x, x[0], 1e-6, weight, gated=True, **options)
    (kernel,) = found
    assert kernel.metadata.name == KERNELS[rows]
    return kernel


@pytest.mark.parametrize("rows", KERNELS)
def test_a_dependent_launch_touches_nothing_but_weights_before_it_waits(rows: int) -> None:
    kernel = compiled(rows, 90, dependent=True)
    code = kernel.asm["ptx"]
    assert kernel.metadata.launch_pdl
    before, wait, behind = code.partition("griddepcontrol.wait")
    assert wait
    assert "griddepcontrol.wait" not in behind
    assert before.count("griddepcontrol.launch_dependents") == 1
    assert "prefetch.global.L2" in before
    assert not READS.search(before)
    assert READS.search(behind)
    assert not inspect(kernel, 90).spills


def test_launches_depend_on_nothing_unless_asked_and_where_no_gpu_has_it() -> None:
    assert dependent.DEPENDENT is False
    for kernel in (compiled(8, 90), compiled(1, 90), compiled(8, 80, dependent=True)):
        assert not kernel.metadata.launch_pdl
        assert "griddepcontrol" not in kernel.asm["ptx"]
        assert "prefetch" not in kernel.asm["ptx"]


def test_the_prefetched_columns_are_the_first_that_are_read() -> None:
    """Each program's: two tiles of its split, a line of 128 bytes at a time."""
    count = {rows: compiled(rows, 90, dependent=True).asm["ptx"].count("prefetch.global.L2")
             for rows in KERNELS}  # fmt: skip
    config = partial(gemv.config_for, num_out=4096, size=1024, dtype=BF16, arch=90)
    for rows, found in count.items():
        tile = config(1 if rows == 1 else max(rows, 16), multiprocessors=132)
        lines = tile.block_out * -(-2 * tile.block_in // 64)
        assert found == max(1, lines // (32 * tile.num_warps))
