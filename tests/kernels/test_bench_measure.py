"""Timing without a GPU: a stopwatch whose time is made up, and a made-up `torch.cuda`."""

import math
from contextlib import contextmanager

import pytest
import torch

from minillm_kernels.bench.case import Measurement
from minillm_kernels.bench.ceilings import ceilings
from minillm_kernels.bench.gpu import (
    MAX_CALLS,
    Gpu,
    NoGpuError,
    NotANumberError,
    calls_per_timing,
    refuse_nan,
    require_gpu,
)
from minillm_kernels.bench.measure import Effort, measure

MB = 10**6


class Clock:
    """Time that passes when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeContender:
    def __init__(self, gpu, call, num_sets):
        self.gpu, self.call, self.calls, self.how = gpu, call, 4 * num_sets, gpu.how
        self.closed = False

    def seconds(self):
        took = self.call(0)
        self.gpu.log.append(took)
        self.gpu.clock.now += took * self.calls
        return took

    def close(self):
        self.closed, self.call = True, None


class FakeGpu:
    """Every call returns how many seconds it takes; what a call raises breaks nothing else."""

    cache_bytes = 60 * MB

    def __init__(self, how="graph", warm_up=0.0):
        self.clock, self.how, self.warm_up = Clock(), how, warm_up
        self.log, self.made = [], []

    def ready(self, call, num_sets):
        for index in range(num_sets):
            call(index)
        self.clock.now += self.warm_up
        self.made.append(FakeContender(self, call, num_sets))
        return self.made[-1]


def case(name="one", seconds=1e-3, peers=None, **options):
    """A measurement that takes `seconds`: a number, or a function of the input set."""

    def call(value):
        return value if callable(value) else lambda index: value

    named = {peer: call(value) for peer, value in (peers or {}).items()}
    options = {"num_bytes": 1000 * MB, "num_sets": 2} | options
    return Measurement("fake", name, call(seconds), peers=named, **options)


def raises(error):
    def call(index):
        raise error

    return call


def fails_after(count, seconds, error):
    calls = []

    def call(index):
        calls.append(index)
        if len(calls) > count:
            raise error
        return seconds

    return call


# ---- one measurement --------------------------------------------------------------------------


def test_the_peers_are_timed_in_turn_with_ours():
    gpu = FakeGpu()
    effort = Effort(least=3, most=5, seconds=1e9)
    found = measure(case(seconds=1.0, peers={"b": 2.0, "c": 3.0}), gpu, effort, gpu.clock)
    assert gpu.log == [1.0, 2.0, 3.0] * 5
    timing = {"time_us": 1e6, "spread": 0.0, "repeats": 5, "calls": 8, "how": "graph"}
    assert {name: found[name] for name in timing} == timing
    assert [peer["ratio"] for peer in found["peers"]] == [2.0, 3.0]
    assert all(contender.closed for contender in gpu.made)


def test_a_measurement_stops_at_its_time_but_not_before_the_least_rounds():
    for seconds, repeats in ((79.0, 10), (-5.0, 3)):  # eight calls of a second per timing
        gpu = FakeGpu()
        effort = Effort(least=3, most=100, seconds=seconds)
        assert measure(case(seconds=1.0), gpu, effort, gpu.clock)["repeats"] == repeats


def test_median_spread_and_rates():
    values = iter([0.0, 0.0, 5.0, 1.0, 3.0, 2.0, 4.0])  # the first two are the warm-up's
    gpu = FakeGpu()
    one = case(seconds=lambda index: next(values), num_flops=6 * 10**12)
    found = measure(one, gpu, Effort(least=5, most=5), gpu.clock)
    assert found["time_us"] == 3e6
    assert found["spread"] == pytest.approx((4.0 - 2.0) / 3.0)
    assert found["gb_per_s"] == pytest.approx(1 / 3)
    assert found["tflop_per_s"] == pytest.approx(2)
    assert measure(case(), gpu, Effort(least=1, most=1), gpu.clock)["spread"] == 0.0


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried much.\nadvice"), ValueError("no")]
)
def test_a_failing_peer_is_a_row_of_its_own(error):
    gpu = FakeGpu()
    peers = {"bad": raises(error), "late": fails_after(4, 2.0, error), "good": 2.0}
    found = measure(case(peers=peers, peer_targets={"good": 1.5}), gpu, Effort(5, 5), gpu.clock)
    bad, late, good = found["peers"]
    assert found["time_us"] == 1e3
    assert (good["time_us"], good["target"]) == (2e6, 1.5)
    told = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert [(each["time_us"], each["ratio"], each["error"]) for each in (bad, late)] == [
        (None, None, told)
    ] * 2


@pytest.mark.parametrize("count", [0, 4])
def test_a_failing_measurement_raises_and_gives_memory_back(count):
    gpu = FakeGpu()
    one = case(seconds=fails_after(count, 1.0, ValueError("no")), peers={"b": 1.0})
    with pytest.raises(ValueError, match="no"):
        measure(one, gpu, Effort(5, 5), gpu.clock)
    assert all(contender.closed for contender in gpu.made)


# ---- the stopwatch ----------------------------------------------------------------------------


def test_a_timing_is_long_enough_and_visits_every_input_set_equally_often():
    assert calls_per_timing(1e-3, 1) == 2
    assert calls_per_timing(1e-3, 3) == 3
    assert calls_per_timing(1e-4, 3) == 21
    assert calls_per_timing(5.0, 3) == 3
    assert calls_per_timing(0.0, 1) == MAX_CALLS
    assert calls_per_timing(1e-9, 7) == MAX_CALLS // 7 * 7


def test_nan_is_no_fair_input():
    refuse_nan((torch.ones(2), [torch.tensor([1, 2]), None, torch.tensor([math.inf])]))
    refuse_nan(None)
    with pytest.raises(NotANumberError, match="has NaN in it"):
        refuse_nan((torch.ones(2), [torch.tensor([1.0, math.nan])]))


class FakeCuda:
    """In the place of torch.cuda: a device that takes 100 us per call."""

    def __init__(self, monkeypatch, captures=True):
        self.now, self.capturing, self.captures, self.lost = 0.0, None, captures, False
        outer = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = outer.now

            def synchronize(self):
                pass

            def elapsed_time(self, other):
                return (other.at - self.at) * 1e3

        class CUDAGraph:
            def __init__(self):
                self.calls, self.was_reset = [], False

            def replay(self):
                assert not self.was_reset
                outer.now += 1e-4 * len(self.calls)

            def reset(self):
                self.was_reset = True

        @contextmanager
        def graph(made):
            if not outer.captures:
                raise RuntimeError("operation not permitted when stream is capturing")
            outer.capturing = made
            yield
            outer.capturing = None

        fakes = {"Event": Event, "CUDAGraph": CUDAGraph, "graph": graph}
        fakes["synchronize"] = self.synchronize
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        self.gpu = Gpu.__new__(Gpu)

    def synchronize(self):
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")

    def call(self, index):
        if self.capturing is not None:
            self.capturing.calls.append(index)
        else:
            self.now += 1.5e-4  # the host's share
        return torch.ones(1)


def test_calls_are_captured_into_a_graph_of_the_right_length(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    contender = cuda.gpu.ready(cuda.call, 3)
    assert (contender.how, contender.calls) == ("graph", 21)
    assert contender.graph.calls == [0, 1, 2] * 7
    assert contender.seconds() == pytest.approx(1e-4)
    contender.close()
    assert contender.graph.was_reset
    contender.step()  # does nothing


def test_what_cannot_be_captured_is_launched_and_says_so(monkeypatch):
    cuda = FakeCuda(monkeypatch, captures=False)
    contender = cuda.gpu.ready(cuda.call, 2)
    assert (contender.how, contender.calls) == ("launches", 14)
    assert contender.seconds() == pytest.approx(1.5e-4)


def test_the_first_timing_is_not_counted(monkeypatch):
    """The step before the first event keeps the GPU busy, and is no part of the timing."""
    cuda = FakeCuda(monkeypatch)
    contender = cuda.gpu.ready(cuda.call, 1)
    before = cuda.now
    contender.seconds()
    assert cuda.now - before == pytest.approx(2 * contender.calls * 1e-4)


def test_an_old_gpu_or_none_is_refused_in_one_sentence(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("minillm_kernels.launch.INTERPRETED", True)
    with pytest.raises(NoGpuError, match="TRITON_INTERPRET=1 is set"):
        require_gpu()
    monkeypatch.setattr("minillm_kernels.launch.INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoGpuError, match=r"compute capability 8\.0 \(Ampere\) or newer, and torch"):
        require_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(NoGpuError, match=r"Tesla T4 has compute capability 7\.5; the kernels need"):
        require_gpu()


def test_the_ceilings_are_what_they_say():
    """At toy sizes, on the CPU."""
    read, copy, matmul = ceilings(tiny=True)
    assert read.run(0) != read.run(1)
    assert read.peers["the largest"](0) <= 2**31
    assert read.num_bytes == 256
    for index in range(copy.num_sets):
        copied = copy.run(index).clone()
        assert torch.equal(copy.peers["by a kernel"](index), ~copied)
    assert copy.num_bytes == 2 * 256
    assert matmul.run(0).shape == (16, 16)
    assert not torch.equal(matmul.run(0), matmul.run(1))
    assert matmul.num_flops == 2 * 16**3
