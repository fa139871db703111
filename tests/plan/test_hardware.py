"""Datasheet figures against bus arithmetic, the physical guard, and the cache of measurements."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from minillm.errors import ConfigError, MinillmError
from minillm.lab import ceilings
from minillm.lab.ceilings import measure
from minillm.lab.hardware import (
    DATASHEET,
    Hardware,
    ImpossibleMeasurementError,
    achieved,
    check_physical,
)
from minillm.lab.roofline import step_cost
from minillm.models.presets import preset

MACHINE = Hardware("this", 2**34, 50e9, 800e9, 1e-6, "measured", peak_flops_fp32=200e9)


@pytest.mark.parametrize(
    ("key", "bus_bits", "gigabits_per_pin"),
    [  # claims A4 to A8
        ("a100-sxm", 5120, 3.186),
        ("h100-sxm", 5120, 5.23),
        ("h200", 6144, 6.25),
        ("b200", 8192, 7.81),
        ("mi300x", 8192, 5.18),
        ("rtx-5070-ti", 256, 28),
        ("apple-m1", 128, 4.266),
        ("apple-m2", 128, 6.4),
        ("apple-m1-max", 512, 6.4),
        ("laptop-ddr5", 128, 5.6),
    ],
)
def test_bandwidth_is_bus_width_times_pin_rate(key, bus_bits, gigabits_per_pin):
    expected = bus_bits * gigabits_per_pin / 8 * 1e9
    assert DATASHEET[key].bandwidth == pytest.approx(expected, rel=0.025)


@pytest.mark.parametrize(
    ("key", "lanes", "clock"),  # float32 multiply-adds per cycle of the vector units, boost clock
    [
        ("a100-sxm", 108 * 64, 1.41e9),
        ("h100-sxm", 132 * 128, 1.98e9),
        ("h200", 132 * 128, 1.98e9),
        ("mi300x", 304 * 128, 2.1e9),
        ("rtx-5070-ti", 70 * 128, 2.452e9),
    ],
)
def test_float32_has_its_own_rate(key, lanes, clock):
    assert DATASHEET[key].rate("float32") == pytest.approx(2 * lanes * clock, rel=0.005)
    assert DATASHEET[key].rate("float32") < DATASHEET[key].rate("bfloat16") / 1.9


def test_eight_bits_are_as_fast_as_the_datasheet_says_and_no_slower_than_16():
    a100 = DATASHEET["a100-sxm"]  # has int8 and no FP8
    assert (a100.rate("int8"), a100.rate("fp8")) == (624e12, a100.rate("bfloat16"))


def test_achieved():
    result = achieved(flops=4e9, num_bytes=10e9, seconds=0.5, hardware=MACHINE)
    assert result.bandwidth == 20e9
    assert result.bandwidth_fraction == pytest.approx(0.4)
    assert result.flops_fraction == pytest.approx(0.01)
    assert achieved(4e9, 10e9, 0.5, MACHINE, "float32").flops_fraction == pytest.approx(0.04)


def test_an_article_s_prefill_is_impossible():
    """Claim A24: 3,312 prompt tokens of a 3B model in 67 ms are 297 TFLOP/s on a card of 88."""
    cost = step_cost(preset("qwen2.5-3b"), [3312], [3312])
    card = DATASHEET["rtx-5070-ti"]
    with pytest.raises(ImpossibleMeasurementError, match=r"operations .* 29\d\.\d TFLOP/s, 3\.3"):
        check_physical(cost.flops, cost.total_bytes, 0.0674, card)
    assert check_physical(cost.flops, cost.total_bytes, 0.25, card).flops_fraction < 1


def test_the_limit_that_is_exceeded_most_is_named():
    with pytest.raises(ImpossibleMeasurementError, match=r"operations .* 40\.00 times"):
        check_physical(40 * MACHINE.peak_flops, 2 * MACHINE.bandwidth, 1.0, MACHINE)
    with pytest.raises(ImpossibleMeasurementError, match=r"bytes .* 40\.00 times"):
        check_physical(2 * MACHINE.peak_flops, 40 * MACHINE.bandwidth, 1.0, MACHINE)


def test_slack_and_impossible_times():
    assert check_physical(0, 55e9, 1.0, MACHINE, slack=0.2).bandwidth_fraction > 1
    with pytest.raises(MinillmError, match="GB/s"):
        check_physical(0, 55e9, 1.0, MACHINE)
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(ImpossibleMeasurementError, match="must be positive"):
            check_physical(1, 1, seconds, MACHINE)


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """A cache folder of its own and a list of measurements to hand out instead of probing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    results = [MACHINE]
    monkeypatch.setattr(ceilings, "_measure_cpu", lambda name, device: results.pop(0))
    monkeypatch.setattr(ceilings.machine, "seconds_waited", lambda: 0.0)
    return results


def test_measured_once_then_cached(probe, tmp_path):
    assert measure() == MACHINE
    assert measure() == MACHINE
    assert not probe
    assert [p.name for p in (tmp_path / "minillm").iterdir()] == ["hardware.json"]


def test_refresh_returns_the_new_and_keeps_the_best(probe):
    disturbed = replace(MACHINE, bandwidth=20e9, overhead=9e-6, peak_flops=900e9)
    disturbed = replace(disturbed, source=ceilings.DISTURBED)
    probe.append(disturbed)
    measure()
    assert measure(refresh=True) == disturbed
    assert measure() == replace(MACHINE, peak_flops=900e9)


def test_a_disturbed_measurement_is_repeated(probe, monkeypatch):
    slow = replace(MACHINE, bandwidth=4e9, overhead=1e-7)
    probe[:] = [slow, MACHINE]
    waits = iter([0.0, 1e6, 1e6, 1e6])
    monkeypatch.setattr(ceilings.machine, "seconds_waited", lambda: next(waits))
    assert measure() == replace(slow, source=ceilings.DISTURBED)
    assert measure() == measure() == replace(MACHINE, overhead=1e-7)
    assert not probe


@pytest.mark.parametrize("change", ["threads", "quota", "torch"])
def test_another_set_up_is_measured_anew(probe, monkeypatch, change):
    measure()
    probe.append(replace(MACHINE, bandwidth=1e9))
    if change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    elif change == "quota":
        monkeypatch.setattr(ceilings.machine, "cpu_count", lambda: 77)
    else:
        monkeypatch.setattr(torch, "__version__", "9.9")
    assert measure().bandwidth == 1e9


@pytest.mark.parametrize(
    "content",
    [
        "not json",
        "[]",
        '{"KEY": 3}',
        '{"KEY": {"name": "x"}}',
        '{"KEY": {"name":"x","memory_bytes":1,"bandwidth":NaN,'
        '"peak_flops":1,"overhead":1,"source":""}}',
        '{"KEY": {"name":"x","memory_bytes":"1","bandwidth":1,'
        '"peak_flops":1,"overhead":1,"source":""}}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_cache_is_measured_anew(probe, tmp_path, content):
    measure()
    path = tmp_path / "minillm" / "hardware.json"
    key = next(iter(json.loads(path.read_text())))
    if isinstance(content, str):
        path.write_text(content.replace("KEY", key))
    else:
        path.write_bytes(content)
    probe.append(MACHINE)
    assert measure() == MACHINE
    assert json.loads(path.read_text()) == {key: asdict(MACHINE)}


def test_a_cache_that_cannot_be_written_is_no_error(probe, tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    probe.append(MACHINE)
    assert measure() == measure() == MACHINE


def test_no_home_folder_is_no_error(probe, monkeypatch):
    def no_home():
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(ceilings.Path, "home", no_home)
    assert measure() == MACHINE


def test_probes_give_a_valid_description(monkeypatch):
    """The real probes, on buffers too small to say anything about this machine."""
    monkeypatch.setattr(ceilings.machine, "available_memory_bytes", lambda: 2**23)
    with torch.inference_mode():
        found = ceilings._measure_cpu("x", "cpu", budget=0.001)
    assert found.source == "measured"
    assert found.memory_bytes == ceilings.machine.total_memory_bytes()


def test_a_packed_product_is_the_product():
    """What is timed reads every weight: its result is right."""
    x, weight = torch.randn(1, 64), torch.randn(96, 64)
    with torch.inference_mode():
        for run in ceilings._packed_product(x, weight):
            torch.testing.assert_close(run(), x @ weight.T)


def test_without_the_private_operations_sums_remain(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object(), raising=False)
    assert ceilings._packed_product(torch.ones(1, 4), torch.ones(4, 4)) == []
    assert ceilings._cpu_read_bandwidth(2**16, torch.float32, 0.001) > 0


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["memory_bytes", "bandwidth", "peak_flops_fp32", "overhead"])
def test_ceilings_are_positive_and_finite(field, value):
    with pytest.raises(ConfigError, match=f"{field} of this is"):
        replace(MACHINE, **{field: value})
