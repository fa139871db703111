"""Rotary angles in C, against float64."""

import pytest
import torch

from minillm import ops
from minillm.ops import cpu
from minillm_kernels import reference

FREQUENCIES = 1 / 10000 ** (torch.arange(0, 64, 2) / 64)


@pytest.fixture(autouse=True)
def _built() -> None:
    if not cpu.takes(FREQUENCIES):
        pytest.skip(cpu.describe(torch.float32))


@pytest.mark.parametrize("count", [0, 1, 7, 500])
def test_angles_are_those_of_float64(count):
    positions = torch.randint(0, 131072, (count,), generator=torch.Generator().manual_seed(count))
    cos, sin = ops.cos_sin(positions, FREQUENCIES, 1.5)
    # The product of position and frequency is rounded to float32, as in transformers.
    angles = (positions.float().unsqueeze(1) * FREQUENCIES).double()
    torch.testing.assert_close(cos.double(), angles.cos() * 1.5, rtol=0, atol=2e-7)
    torch.testing.assert_close(sin.double(), angles.sin() * 1.5, rtol=0, atol=2e-7)


def test_positions_with_a_stride_and_in_other_integers():
    positions = torch.arange(40)
    expected = reference.cos_sin(positions[::2], FREQUENCIES, 1.0)
    for given in (positions[::2], positions[::2].int()):
        torch.testing.assert_close(cpu.cos_sin(given, FREQUENCIES, 1.0), expected)


def test_frequencies_of_another_type_are_computed_by_torch_and_never_read_by_c():
    wrong, positions = FREQUENCIES.bfloat16(), torch.arange(5)
    got = ops.cos_sin(positions, wrong, 1.0)
    torch.testing.assert_close(got, reference.cos_sin(positions, wrong, 1.0))
    with pytest.raises(
        ValueError, match=r"frequencies is .* must be contiguous .32., torch.float32"
    ):
        cpu.cos_sin(positions, wrong, 1.0)
