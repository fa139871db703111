"""Every measurement of the benchmark, once, at toy sizes: does it run, and is its arithmetic right?

On a GPU a benchmark that fails costs a row of the table; here it costs a test.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from minillm_kernels.bench.case import Measurement
from minillm_kernels.families import FAMILIES, measurements

TOY = {family: measurements(family, tiny=True) for family in FAMILIES}
EACH = [
    pytest.param(measurement, id=f"{family}-{measurement.name}")
    for family, found in TOY.items()
    for measurement in found
]
H200_CACHE = 60 << 20  # bytes
BOUNDS = {"copy", "matmul", "latency"}


def tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for part in result:
            yield from tensors(part)


@pytest.mark.parametrize("measurement", EACH)
def test_a_measurement_runs_on_real_numbers(measurement: Measurement):
    """NaN would cost nothing to multiply; the benchmark refuses it, too."""
    found = list(tensors(measurement.run(0)))
    assert found, "a measurement returns what it computed, so that outputs rotate, too"
    for tensor in found:
        assert tensor.numel()
        assert not (tensor.is_floating_point() and tensor.isnan().any())
        assert not (tensor.is_floating_point() and (tensor == 0).all()), "zeros run faster"


def assert_consistent(measurement: Measurement) -> None:
    assert measurement.name
    assert measurement.num_bytes > 0
    assert measurement.num_flops >= 0
    assert measurement.bound in BOUNDS
    assert measurement.num_flops > 0 or measurement.bound != "matmul"
    assert measurement.num_sets >= 1
    assert set(measurement.peer_targets) <= set(measurement.peers)
    assert all(0 < target < 100 for target in measurement.peer_targets.values())
    if measurement.target is not None:
        assert 0 < measurement.target < (100 if measurement.bound == "latency" else 1)


@pytest.mark.parametrize("measurement", EACH)
def test_its_arithmetic_is_consistent(measurement: Measurement):
    assert_consistent(measurement)


@pytest.mark.parametrize("family", FAMILIES)
def test_at_full_size_they_are_consistent_and_cost_nothing_until_they_run(family):
    """Memory is given out at the first call, so a list of them can be made here."""
    found = measurements(family)
    names = [measurement.name for measurement in found]
    assert len(set(names)) == len(names)
    assert {measurement.family for measurement in found} == {family}
    for measurement in found:
        assert_consistent(measurement)
        intensity = measurement.num_flops / measurement.num_bytes
        if measurement.bound == "matmul":
            assert intensity > 100, f"{measurement.name} is bound by memory on an H200"
        elif measurement.bound == "copy":
            assert intensity < 300, f"{measurement.name} is bound by its products on an H200"
            together = measurement.num_sets * measurement.num_bytes
            assert together > 2 * H200_CACHE, f"{measurement.name} would be measured in the cache"


@pytest.mark.parametrize("family", FAMILIES)
def test_its_input_sets_differ(family):
    """One buffer in every set would be measured in the cache; and each set has to work."""
    for measurement in [each for each in TOY[family] if each.num_sets > 1][:1]:
        results = [next(tensors(measurement.run(index))) for index in range(measurement.num_sets)]
        first, *others = [result.double().nan_to_num() for result in results]
        assert any(not torch.equal(first, other) for other in others)


def error_between(ours: object, theirs: object) -> float | None:
    """Largest difference as a share of the largest number; None for results of other shapes.

    torch's attention gives [B, H, T, D] where the kernels give [B T, H, D].
    """
    mine, other = list(tensors(ours)), list(tensors(theirs))
    other = [each.transpose(1, 2).flatten(0, 1) if each.ndim == 4 else each for each in other]
    if [tensor.shape for tensor in mine] != [tensor.shape for tensor in other]:
        return None
    worst = 0.0
    for got, wanted in zip(mine, other, strict=True):
        got, wanted = got.double(), wanted.double()
        scale = max(float(wanted.abs().max()), 1e-3)
        worst = max(worst, float((got - wanted).abs().max()) / scale)
    return worst


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "sampling"])
def test_a_peer_that_runs_on_a_cpu_computes_the_same(family):
    """Roughly; in sampling the noise is another. One that needs CUDA raises, as it may."""
    errors = []
    for measurement in TOY[family]:
        for name, peer in measurement.peers.items():
            try:
                theirs = peer(0)
            except Exception:
                continue
            error = error_between(measurement.run(0), theirs)
            if error is not None:
                errors.append(error)
                assert error < 0.05, f"{measurement.name} against {name}"
    assert errors, "no peer of this family runs on a CPU"
