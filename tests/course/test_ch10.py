"""Chapter 10's own functions on devices that are not there, and transfers."""

import math
from types import SimpleNamespace

import pytest
import torch
from notebook_chapter import NOTEBOOKS, Chapter

from minillm_exercises.chapters import ch10, ch10_pictures, ch10_tables

# claims I9, I10, I11, I12, I6 ----------------------------------------------------------------


@pytest.mark.parametrize(("backend", "outcome"), [
    ("MATH", "runs"), ("FLASH_ATTENTION", "runs"), ("EFFICIENT_ATTENTION", "raises"),
    ("CUDNN_ATTENTION", "raises"),
])  # fmt: skip
def test_what_runs_on_a_cpu(backend, outcome):
    heads = [x[None] for x in ch10.inputs(4, 8)]
    assert ch10.outcome(lambda: ch10.forced(backend, *heads)) == outcome


def test_forced_attention_is_attention():
    heads = [x[None] for x in ch10.inputs(4, 8)]
    right = ch10.sdpa(*ch10.inputs(4, 8))
    assert ch10.worst(ch10.forced("FLASH_ATTENTION", *heads)[0], right) < 1e-6


def test_without_triton_the_reference_is_asked(monkeypatch):
    monkeypatch.setattr(ch10_tables, "find_spec", lambda name: None)
    q, k, v = ch10.inputs(9, 16)
    by, found = ch10_tables.engine(q, k, v, causal=True, block=16)
    assert by == "reference"
    assert ch10.worst(found, ch10.masked(q, k, v)) < 1e-5


def test_the_kernel_runs_where_kernels_run(monkeypatch):
    """Interpreted on the CPU; compiled on a GPU, on the device of the query if that is one."""
    from minillm_kernels import launch

    q = torch.ones(2, 16)
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert ch10_tables.kernel_device(q) == torch.device("cpu")
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ch10_tables.kernel_device(q) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ch10_tables.kernel_device(q) == torch.device("cuda")
    there = SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))
    assert ch10_tables.kernel_device(there) == torch.device("cuda:1")


def test_on_a_gpu_the_kernel_gets_tensors_of_the_gpu(monkeypatch):
    """The device is fake: "meta" has shapes and no numbers."""
    from minillm_kernels import flash_attention

    seen = []

    def kernel(*arguments, block):
        seen.append((arguments, block))
        return torch.full((9, 1, 16), 7.0)

    monkeypatch.setattr(ch10_tables, "kernel_device", lambda q: torch.device("meta"))
    monkeypatch.setattr(flash_attention, "flash_attention", kernel)
    by, found = ch10_tables.engine(*ch10.inputs(9, 16), causal=True, block=32)
    ((*tensors, scale, causal), block) = seen[0]
    assert [tuple(each.shape) for each in tensors] == [(9, 1, 16)] * 3 + [(2,)] * 2
    assert {each.device.type for each in tensors} == {"meta"}
    assert (scale, causal, block) == (0.25, True, 32)
    assert by == "kernel"
    assert torch.equal(found, torch.full((9, 16), 7.0))


def test_transfers_count_the_tiles_of_a_walk():
    walks = [ch10_pictures.visits(order, 3) for order in ch10.LOOPS[1:]]
    first, second = (
        ch10_pictures.transfers(order, walk)
        for order, walk in zip(ch10.LOOPS[1:], walks, strict=True)
    )
    assert first == {"K, V in": 6, "Q in": 6, "O in": 6, "O out": 6}
    assert second == {"K, V in": 12, "Q in": 3, "O in": 0, "O out": 3}
    part = ch10_pictures.transfers(ch10.LOOPS[2], walks[1][:3])
    assert part == {"K, V in": 6, "Q in": 2, "O in": 0, "O out": 2}


def test_the_chapter_s_attention_works_on_another_device():
    """Its own functions, from the committed cells, on a device that has shapes and no numbers."""
    cells = Chapter.load(NOTEBOOKS / "10_flash_attention.ipynb").cells
    space = {"torch": torch, "math": math}
    wanted = ("def plain(", "def part(", "def tiled(", "def causal(")
    for cell in cells:
        if cell["cell_type"] == "code" and any(name in cell["source"] for name in wanted):
            exec(cell["source"], space)
    tensors = ch10.inputs(70, 8, 100, device="meta")
    for name in ("plain", "tiled", "causal"):
        found = space[name](*tensors)
        assert (found.device.type, tuple(found.shape)) == ("meta", (70, 8))


def test_worst_keeps_what_is_not_a_number():
    assert math.isnan(ch10.worst(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])))


def test_masked_is_causal_attention():
    q, k, v = ch10.inputs(9, 8, dtype=torch.float64)
    assert ch10.worst(ch10.masked(q, k, v), ch10.sdpa(q, k, v, is_causal=True)) < 1e-12
