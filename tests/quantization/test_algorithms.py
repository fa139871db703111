"""The quantisation algorithms beside independent ones, and planted bugs that these checks find."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from minillm.errors import ConfigError
from minillm.lab.quantise import awq, fp8, gptq, nf4, smoothquant
from minillm.lab.quantise.grid import Grid
from minillm.quantization.rounding import round_with_minima
from tests.quantization import algorithm_checks as checks

CHECKS: dict[ModuleType, tuple[Callable[[ModuleType], None], ...]] = {
    gptq: (
        checks.gptq_equals_the_textbook,
        checks.two_columns_by_hand,
        checks.unit_hessian_gives_rounding,
        checks.every_block_size_is_the_same,
        checks.error_is_below_rounding,
        checks.dead_inputs_are_ignored,
        checks.act_order_equals_the_textbook,
    ),
    awq: (
        checks.awq_protects_large_inputs,
        checks.awq_equals_a_plain_search,
        checks.clipping_lowers_the_error,
    ),
    smoothquant: (checks.smoothing_balances_largest_values,),
    nf4: (
        checks.levels_are_those_of_bitsandbytes,
        checks.nf4_codes_are_nearest,
        checks.nested_scales_are_close,
    ),
    fp8: (checks.fp8_scales_reach_the_largest_number,),
}


@pytest.mark.parametrize(
    ("module", "check"),
    [(module, check) for module, found in CHECKS.items() for check in found],
    ids=lambda each: each.__name__.rsplit(".", 1)[-1],
)
def test_algorithm(module: ModuleType, check: Callable[[ModuleType], None]) -> None:
    check(module)


def test_minima_beside_numpy() -> None:
    """The best of four ranges for each group, with scales and minima as they are stored."""
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).numpy()
    found = round_with_minima(torch.from_numpy(weight), 32).dense().numpy()
    for group, values in zip(weight.reshape(-1, 32), found.reshape(-1, 32), strict=True):
        errors = []
        for shrink in (1, 0.95, 0.9, 0.85):
            half, middle = (group.max() - group.min()) / 2 * shrink, (group.max() + group.min()) / 2
            scale, least = np.float16(half / 7.5), np.float16(middle - half)
            codes = ((group - np.float32(least)) / np.float32(scale)).round().clip(0, 15)
            errors.append(((codes * np.float32(scale) + np.float32(least) - group) ** 2).sum())
        assert ((values - group) ** 2).sum() == pytest.approx(min(errors), rel=1e-3)


def test_too_little_damping_is_one_sentence() -> None:
    singular = torch.ones(8, 8)
    with pytest.raises(ConfigError, match="--damp 0"):
        gptq.gptq(torch.ones(2, 8), singular, Grid(), 8, gptq.GPTQOptions(damp=0.0))
