"""The law of a decode step: counts times rates, part by part."""

from dataclasses import replace

import pytest

from minillm.errors import ConfigError
from minillm.lab.decode_law import DecodeRates, decode_time
from minillm.lab.roofline import step_cost
from minillm.models.presets import preset

RATES = DecodeRates(stream=10e9, matrix=500e9, pages=5e9, step_seconds=0.001, row_seconds=0.0001)
CONFIG = preset("smollm2-135m")


def test_each_part_has_its_own_rate() -> None:
    cost = step_cost(CONFIG, [1, 1], [128, 256])
    time = decode_time(cost, RATES)
    assert time.products == cost.weight_bytes / 10e9
    assert time.pages == (cost.kv_read_bytes + cost.kv_write_bytes) / 5e9
    assert time.overhead == pytest.approx(0.0012)
    assert time.seconds == time.products + time.pages + time.overhead
    assert cost.kv_read_bytes == (128 + 256) * 30 * 2 * 3 * 64 * 2


def test_many_rows_are_bound_by_operations() -> None:
    few, many = (step_cost(CONFIG, [1] * n, [128] * n) for n in (16, 64))
    assert decode_time(few, RATES).products == few.weight_bytes / 10e9
    assert decode_time(many, RATES).products == many.linear_flops / 500e9
    assert many.linear_flops / 500e9 > many.weight_bytes / 10e9


@pytest.mark.parametrize("name", ["stream", "matrix", "pages", "step_seconds", "row_seconds"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_rate_is_a_number(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be a number"):
        replace(RATES, **{name: value})


def test_no_rate_is_nothing_but_an_overhead_may_be() -> None:
    assert replace(RATES, step_seconds=0.0, row_seconds=0.0).row_seconds == 0
    with pytest.raises(ConfigError, match=r"pages is 0\.0; it must be a number, above 0"):
        replace(RATES, pages=0.0)
