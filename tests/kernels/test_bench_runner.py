"""The benchmark without a GPU: a stopwatch whose time is made up, workers that follow a script."""

import gc
import json
import math
import re
import sys
import weakref
from collections.abc import Iterable
from contextlib import contextmanager
from datetime import date
from types import SimpleNamespace

import pytest
import torch

from minillm_kernels import families
from minillm_kernels.bench import __main__ as cli
from minillm_kernels.bench import gpu as gpu_module
from minillm_kernels.bench import report
from minillm_kernels.bench.case import Measurement
from minillm_kernels.bench.ceilings import Ceilings, ceilings
from minillm_kernels.bench.gpu import (
    MAX_CALLS,
    Gpu,
    NoGpuError,
    NotANumberError,
    calls_per_timing,
    refuse_nan,
    require_gpu,
)
from minillm_kernels.bench.results import Peer, Result, Timing
from minillm_kernels.bench.runner import QUICK, Budget, Effort, measure, measure_all
from minillm_kernels.bench.supervisor import Process, Run, Supervisor
from minillm_kernels.bench.worker import Job, work

MB = 10**6
FACTS = {
    "name": "NVIDIA H200",
    "compute_capability": "9.0",
    "multiprocessors": 132,
    "memory_bytes": 150_000_000_000,
    "l2_cache_bytes": 60 * MB,
    "driver": "1.2",
    "cuda": "13.0",
    "torch": "2.13.0",
    "triton": "3.7.1",
}


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
        self.log, self.made, self.freed, self.broken = [], [], 0, False

    def ready(self, call, num_sets):
        for index in range(num_sets):
            call(index)
        self.clock.now += self.warm_up
        self.made.append(FakeContender(self, call, num_sets))
        return self.made[-1]

    def lost(self):
        return self.broken

    def free(self):
        self.freed += 1


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
    found = measure(case(seconds=1.0, peers={"b": 2.0, "c": 3.0}), gpu, gpu.clock, 1e9, effort)
    assert gpu.log == [1.0, 2.0, 3.0] * 5
    assert found.timing == Timing(1.0, 0.0, repeats=5, calls=8, how="graph")
    assert [peer.timing.seconds for peer in found.peers] == [2.0, 3.0]
    assert all(contender.closed for contender in gpu.made)


def test_a_measurement_stops_at_its_time_but_not_before_the_least_rounds():
    gpu = FakeGpu()
    effort = Effort(least=3, most=100, seconds=1e9)
    many = measure(case(seconds=1.0), gpu, gpu.clock, gpu.clock.now + 79.0, effort)
    assert many.timing.repeats == 10  # eight calls of a second per timing
    few = measure(case(seconds=1.0), gpu, gpu.clock, gpu.clock.now - 5.0, effort)
    assert few.timing.repeats == 3


def test_median_and_spread():
    values = iter([0.0, 0.0, 5.0, 1.0, 3.0, 2.0, 4.0])  # the first two are the warm-up's
    gpu = FakeGpu()
    effort = Effort(least=5, most=5)
    found = measure(case(seconds=lambda index: next(values)), gpu, gpu.clock, 0.0, effort)
    assert found.timing.seconds == 3.0
    assert found.timing.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert Timing.of([2.0], 1, "graph").spread == 0.0


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried much.\nadvice"), ValueError("no")]
)
def test_a_failing_peer_is_a_row_of_its_own(error):
    gpu = FakeGpu()
    peers = {"bad": raises(error), "good": 2.0}
    found = measure(case(peers=peers), gpu, gpu.clock, 0.0, Effort())
    bad, good = found.peers
    assert found.error is None
    assert found.timing.seconds == 1e-3
    assert good.timing.seconds == 2.0
    assert bad.timing is None
    assert bad.error == f"{type(error).__name__}: {str(error).splitlines()[0]}"


def test_a_peer_that_fails_while_it_is_timed_hurts_nobody():
    gpu = FakeGpu()
    peers = {"bad": fails_after(4, 2.0, RuntimeError("late")), "good": 3.0}
    found = measure(case(peers=peers), gpu, gpu.clock, 0.0, Effort(least=5, most=5))
    assert found.peers[0].timing is None
    assert found.peers[0].error == "RuntimeError: late"
    assert found.timing.repeats == found.peers[1].timing.repeats == 5


def test_a_failing_measurement_hurts_no_other():
    gpu = FakeGpu()
    broken = case("broken", raises(torch.OutOfMemoryError("CUDA out of memory.")), {"peer": 1.0})
    late = case("late", fails_after(3, 1.0, RuntimeError("gone")), {"peer": 1.0})
    budget = Budget(gpu.clock, gpu.clock.now + 1e9, 3)
    found = list(measure_all([broken, late, case("good")], gpu, budget, Effort()))
    assert [each.error for each in found] == [
        "OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: gone",
        None,
    ]
    assert found[0].timing is found[1].timing is None
    assert found[2].timing.seconds == 1e-3


def test_inputs_that_stay_in_the_cache_are_noted():
    gpu = FakeGpu()

    def notes(**options):
        return measure(case(**options), gpu, gpu.clock, 0.0, Effort()).notes

    assert notes(num_bytes=60 * MB, num_sets=2) == ()
    assert notes(num_bytes=10 * MB, num_sets=1, bound="latency") == ()
    (note,) = notes(num_bytes=50 * MB, num_sets=2)
    assert note == "the inputs are 100 MB together, which the L2 cache of 60 MB may keep"


# ---- the time budget --------------------------------------------------------------------------


def test_the_time_is_shared_evenly_and_what_one_leaves_the_others_get():
    clock = Clock()
    budget = Budget(clock, clock.now + 40, 4)
    effort = Effort(seconds=100)
    assert budget.slot(effort) == clock.now + 10
    clock.now += 4  # it was quick
    assert budget.slot(effort) == clock.now + 12
    clock.now += 30  # it compiled for long
    assert budget.slot(effort) == clock.now + 3
    clock.now += 5.5
    assert budget.slot(effort) is None
    assert Budget(clock, clock.now + 1000, 2).slot(Effort(seconds=8)) == clock.now + 8


def test_what_no_time_is_left_for_is_left_out():
    gpu = FakeGpu(warm_up=3.0)
    budget = Budget(gpu.clock, gpu.clock.now + 10, 5)
    cases = [case(str(number)) for number in range(5)]
    found = list(measure_all(cases, gpu, budget, Effort(least=1, most=1)))
    assert [each.left_out for each in found] == [None] * 3 + ["the time budget was used up"] * 2
    assert [each.name for each in found] == list("01234")


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


def test_outputs_rotate_as_inputs_do(monkeypatch):
    """An output that is freed before the next call would be written in the cache."""
    cuda = FakeCuda(monkeypatch)
    contender = cuda.gpu.ready(cuda.call, 3)
    assert len({part.data_ptr() for part in contender.kept}) == 3


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


def test_a_lost_device_is_noticed(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    assert not cuda.gpu.lost()
    cuda.lost = True
    assert cuda.gpu.lost()


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


def test_the_driver_is_asked_if_it_is_there(monkeypatch):
    def run(*arguments, **options):
        return SimpleNamespace(returncode=0, stdout="580.65\n580.65\n")

    monkeypatch.setattr(gpu_module.subprocess, "run", run)
    assert gpu_module.driver_version() == "580.65"

    def missing(*arguments, **options):
        raise FileNotFoundError

    monkeypatch.setattr(gpu_module.subprocess, "run", missing)
    assert gpu_module.driver_version() is None


# ---- a worker ---------------------------------------------------------------------------------


def two_ceilings():
    return [
        Measurement("ceilings", "copy", lambda index: 0.5, 1000, peers={"k": lambda index: 0.25}),
        Measurement("ceilings", "matmul", lambda index: 2.0, 10, num_flops=400, bound="matmul"),
    ]


def events(job, gpu, by_family):
    def load(family):
        found = by_family[family]
        if isinstance(found, Exception):
            raise found
        return found

    return list(work(job, gpu, gpu.clock, load, two_ceilings))


def kinds(found):
    return [(each["event"], each.get("index")) for each in found]


def test_a_worker_says_what_it_does():
    cases = {"mla": [case("a"), case("b")], "moe": [case("c")]}
    found = events(Job(("mla", "moe"), 1e6), FakeGpu(), cases)
    assert found[0] == {"event": "plan", "names": [("fake", "a"), ("fake", "b"), ("fake", "c")]}
    assert kinds(found[1:]) == [
        ("begin", -1),
        ("ceilings", None),
        ("begin", 0),
        ("result", 0),
        ("begin", 1),
        ("result", 1),
        ("begin", 2),
        ("result", 2),
        ("begin", -1),
        ("ceilings at the end", None),
        ("end", None),
    ]
    limits = Ceilings.of([Result.from_json(data) for data in found[2]["results"]])
    assert limits == Ceilings(copy=4000.0, matmul=200.0)


def test_measurements_with_a_target_come_first():
    aims = [case("b", target=0.9), case("c", peers={"p": 1.0}, peer_targets={"p": 1.5})]
    cases = {"mla": [case("a"), aims[0]], "moe": [aims[1], case("d")]}
    found = events(Job(("mla", "moe"), 1e6), FakeGpu(), cases)
    assert [name for _, name in found[0]["names"]] == ["b", "c", "a", "d"]


def test_a_result_survives_its_journey_between_processes():
    found = full_run().results[0]
    assert Result.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_worker_goes_on_where_the_last_one_died():
    job = Job(("mla", "moe"), 1e6, start=2, first=False)
    cases = {"mla": [case("a"), case("b"), case("c")], "moe": [case("d")]}
    found = [each for each in events(job, FakeGpu(), cases) if each["event"] == "begin"]
    assert [each["name"] for each in found] == ["c", "d", "device copy and matmul"]
    assert [each["index"] for each in found] == [2, 3, -1]
    assert Job.from_json(job.to_json()) == job


def test_inputs_are_given_back_after_their_measurement():
    references, seen = [], []

    class Inputs:
        def __call__(self, index):
            seen.append(sum(each() is not None for each in references))
            return 1e-3

    def load(family):
        made = [Inputs() for _ in range(3)]
        references.extend(weakref.ref(each) for each in made)
        return [case(str(number), each) for number, each in enumerate(made)]

    gpu = FakeGpu()
    for _ in work(Job(("mla",), 1e6), gpu, gpu.clock, load, two_ceilings):
        gc.collect()
    assert sorted(set(seen), reverse=True) == [3, 2, 1]


def test_a_family_that_cannot_be_listed_costs_no_other():
    cases = {"mla": ImportError("no such kernel"), "moe": [case("d")]}
    found = events(Job(("mla", "moe"), 1e6), FakeGpu(), cases)
    results = [each["result"] for each in found if "result" in each]
    assert [each["name"] for each in results] == ["everything", "d"]
    assert [each["error"] for each in results] == ["ImportError: no such kernel", None]
    again = events(Job(("mla", "moe"), 1e6, first=False), FakeGpu(), cases)
    assert "broken" not in [each["event"] for each in again]  # said once


def test_a_worker_ends_when_its_gpu_is_lost():
    gpu = FakeGpu()

    def illegal(index):
        gpu.broken = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    job = Job(("mla",), 1e6, first=False)
    found = events(job, gpu, {"mla": [case("a"), case("b", illegal), case("c")]})
    assert kinds(found)[-1] == ("result", 1)


def test_a_short_budget_leaves_out_the_last_and_ends():
    job = Job(("mla",), 12.0, quick=True, first=False)
    cases = [case(str(number)) for number in range(4)]
    found = events(job, FakeGpu(warm_up=3.5), {"mla": cases})
    results = [each["result"] for each in found if each["event"] == "result"]
    assert [bool(each["left_out"]) for each in results] == [False, False, False, True]
    assert found[-1] == {"event": "end"}
    assert "ceilings at the end" not in [each["event"] for each in found]


# ---- the supervisor ---------------------------------------------------------------------------


class Scripted:
    """A worker that says what is in its script, then ends, or hangs."""

    def __init__(self, script: Iterable, clock):
        self.script, self.clock, self.stopped = iter(script), clock, False

    def next(self, seconds):
        assert seconds > 0
        event = next(self.script, None)
        if event == "hang":
            self.clock.now += seconds
            raise TimeoutError
        if event == "interrupt":
            raise KeyboardInterrupt
        self.clock.now += 1
        return event

    def last_words(self):
        return "the process ended with exit code -11"

    def stop(self):
        self.stopped = True


NAMES = [("mla", "a"), ("mla", "b"), ("moe", "c")]
GPU_EVENT = {"event": "gpu", "gpu": FACTS}
PLAN = {"event": "plan", "names": NAMES}
END = {"event": "end"}


def begin(index):
    if index < 0:
        return {"event": "begin", "family": "ceilings", "index": -1, "name": "x"}
    family, name = NAMES[index]
    return {"event": "begin", "family": family, "index": index, "name": name}


def result(index, **found):
    family, name = NAMES[index]
    found = {"timing": Timing(1e-3, 0.01, 9, 2, "graph")} | found
    made = Result(family, name, "copy", 4 * 10**9, 0, 1, 0.9, **found)
    return {"event": "result", "index": index, "result": made.to_json()}


def measured(index):
    return [begin(index), result(index)]


def limits_event(kind="ceilings"):
    timing = Timing(1e-3, 0.01, 9, 2, "graph")
    copy = Result("ceilings", "device copy", "copy", 4_300_000_000, 0, 2, None, timing)
    matmul = Result("ceilings", "matmul", "matmul", 1, 790_000_000_000, 2, None, timing)
    return {"event": kind, "results": [copy.to_json(), matmul.to_json()]}


def supervise(scripts, seconds=400.0):
    clock, jobs, said, workers = Clock(), [], [], []
    todo = iter(scripts)

    def start(job):
        jobs.append(job)
        workers.append(Scripted(next(todo), clock))
        return workers[-1]

    run = Supervisor(Job(("mla", "moe"), seconds), start, clock, said.append).go()
    assert all(worker.stopped for worker in workers)
    return run, jobs, said


OPENING = [GPU_EVENT, PLAN]
DIED = "the process ended with exit code -11"


def test_a_good_run_needs_one_worker():
    script = [*OPENING, begin(-1), limits_event(), *measured(0), *measured(1), *measured(2)]
    script += [begin(-1), limits_event("ceilings at the end"), END]
    run, jobs, said = supervise([script])
    assert [each.name for each in run.results] == ["a", "b", "c"]
    assert (len(jobs), run.stopped, run.gpu) == (1, None, FACTS)
    assert len(run.ceilings) == len(run.ceilings_at_end) == 2
    assert said == ["ceilings: x", "mla: a", "mla: b", "moe: c", "ceilings: x"]


def test_a_worker_that_dies_costs_one_row_and_is_replaced():
    first = [*OPENING, begin(-1), limits_event(), begin(0)]
    second = [*OPENING, *measured(1), begin(2)]
    run, jobs, _ = supervise([first, second])
    assert [(each.name, each.error) for each in run.results] == [
        ("a", DIED),
        ("b", None),
        ("c", DIED),
    ]
    assert [(job.start, job.first) for job in jobs] == [(0, True), (1, False)]
    assert jobs[1].seconds < jobs[0].seconds
    assert run.stopped is None


def test_a_worker_that_lost_its_gpu_is_replaced_behind_the_result():
    first = [*OPENING, begin(0), result(0, timing=None, error="illegal")]
    second = [*OPENING, *measured(1), *measured(2), END]
    run, jobs, _ = supervise([first, second])
    assert [each.error for each in run.results] == ["illegal", None, None]
    assert jobs[1].start == 1


def test_a_worker_that_hangs_is_ended():
    run, jobs, _ = supervise(
        [[*OPENING, begin(0), "hang"], [*OPENING, *measured(1), *measured(2), END]]
    )
    assert run.results[0].error == "no answer for 90 s, so the process was ended"
    assert len(jobs) == 2
    assert jobs[1].seconds < 400 - 90


def test_ceilings_that_kill_their_worker_are_not_tried_again():
    second = [*OPENING, *measured(0), *measured(1), *measured(2), END]
    run, jobs, said = supervise([[*OPENING, begin(-1)], second])
    assert [(job.start, job.first) for job in jobs] == [(0, True), (0, False)]
    assert [each.error for each in run.results] == [None] * 3
    assert run.ceilings == ()
    assert said[1] == f"ceilings: {DIED}"


def test_a_family_that_is_broken_is_a_row():
    broken = Result.unmeasured("gemv", "everything", error="ImportError: x").to_json()
    script = [*OPENING, {"event": "broken", "result": broken}, *measured(0), *measured(1)]
    run, _, said = supervise([[*script, *measured(2), END]])
    assert [each.error for each in run.results] == ["ImportError: x", None, None, None]
    assert said[0] == "gemv: everything: ImportError: x"


@pytest.mark.parametrize(("script", "left"), [([], ["everything"] * 2), (OPENING, ["a", "b", "c"])])
def test_a_worker_that_never_begins_ends_the_run(script, left):
    run, jobs, _ = supervise([script])
    assert run.stopped == DIED
    assert [each.name for each in run.results] == left
    assert {each.left_out for each in run.results} == {DIED}
    assert len(jobs) == 1


def test_no_worker_is_started_for_a_few_seconds():
    run, jobs, _ = supervise([[*OPENING, begin(0), "hang"]], seconds=20.0)
    assert run.results[0].error.startswith("no answer for 47 s")  # 30 beyond the budget
    assert [each.left_out for each in run.results[1:]] == ["the time budget was used up"] * 2
    assert len(jobs) == 1


def test_an_interruption_keeps_what_there_is():
    run, _, _ = supervise([[*OPENING, *measured(0), "interrupt"]])
    assert [each.left_out for each in run.results] == [None, "interrupted", "interrupted"]


JOB = Job(("mla",), 5.0)


def process(script):
    return Process(JOB, (sys.executable, "-c", script))


def test_a_real_process_says_lines_and_ends():
    worker = process("import sys; print('{\"event\": 1}'); sys.exit('it is over')")
    assert worker.next(300) == {"event": 1}
    assert worker.next(300) is None
    assert worker.last_words() == "the process ended with exit code 1: it is over"
    worker.stop()


def test_a_real_process_that_hangs_is_stopped():
    worker = process("import time; time.sleep(600)")
    with pytest.raises(TimeoutError):
        worker.next(0.05)
    worker.stop()
    assert worker.process.returncode != 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and it would be measured")
def test_the_real_worker_says_why_it_cannot_work():
    pytest.importorskip("triton")
    worker = Process(JOB)
    assert worker.next(300) is None
    assert "NoGpuError: The benchmark needs an NVIDIA GPU" in worker.last_words()
    worker.stop()


# ---- the report -------------------------------------------------------------------------------


def full_run():
    def timing(seconds, how="graph"):
        return Timing(seconds, 0.0123, 31, 8, how)

    run = Run(gpu=FACTS)
    run.ceilings = tuple(Result.from_json(data) for data in limits_event()["results"])
    run.ceilings_at_end = run.ceilings
    run.results = [
        Result(
            "paged_attention", "causal 1 x 16k, bf16", "matmul", 10**8, 2 * 10**12, 3, 0.65,
            timing(4e-3),
            (
                Peer("SDPA flash", timing(6e-3), target=1.55),
                Peer("cuDNN", timing(3.8e-3, "launches"), target=0.92),
                Peer("varlen_attn", None, "ImportError: not in this torch", 1.2),
            ),
        ),
        Result("mla", "decode", "copy", 10**9, 0, 1, 0.85, timing(2.7e-4), notes=("a note",)),
        Result("sampling", "greedy", "latency", 10**5, 0, 1, 5.0, timing(6.1e-6)),
        Result("sampling", "top-p", "copy", 10**8, 0, 1, None, None, error="OutOfMemoryError: all"),
        Result("moe", "decode", "copy", 10**8, 0, 1, 0.72, left_out="the time budget was used up"),
    ]  # fmt: skip
    return run


def test_rates_shares_and_ratios():
    rows = report.as_json(full_run(), date(2026, 1, 2), False)["rows"]
    prefill, decode, greedy, failed, left = rows
    assert prefill["tflop_per_s"] == pytest.approx(500)
    assert prefill["share"] == pytest.approx(500 / 790)
    assert [peer["ratio"] for peer in prefill["peers"]] == [
        pytest.approx(1.5),
        pytest.approx(0.95),
        None,
    ]
    assert [peer["reached"] for peer in prefill["peers"]] == [False, True, None]
    assert prefill["reached"] is False
    assert decode["share"] == pytest.approx(1e9 / 2.7e-4 / 4.3e12)
    assert decode["reached"] is True
    assert (greedy["share"], greedy["reached"]) == (None, False)
    assert failed["time_us"] is left["share"] is left["reached"] is None


def test_targets_that_were_missed_or_not_judged():
    whole = report.as_json(full_run(), date(2026, 1, 2), False)
    assert whole["targets"] == 7
    assert [(each["family"], each["what"]) for each in whole["misses"]] == [
        ("paged_attention", "share of the matmul ceiling"),
        ("paged_attention", "times as fast as SDPA flash"),
        ("sampling", "microseconds"),
    ]
    assert [each["why"] for each in whole["not_judged"]] == [
        "ImportError: not in this torch",
        "the time budget was used up",
    ]
    assert whole["misses"][2]["wanted"] == 5.0
    assert whole["misses"][2]["got"] == pytest.approx(6.1)


def test_without_ceilings_there_are_times_and_no_shares():
    run = full_run()
    run.ceilings = run.ceilings_at_end = ()
    whole = report.as_json(run, date(2026, 1, 2), True)
    assert whole["ceilings"]["copy_gb_per_s"] is None
    assert whole["rows"][1]["time_us"] == pytest.approx(270)
    assert whole["rows"][1]["share"] is None
    assert "the ceiling was not measured" in [each["why"] for each in whole["not_judged"]]
    assert "copy not measured" in report.as_text(whole)


TABLE = """\
NVIDIA H200: compute capability 9.0, 132 multiprocessors, 150 GB, L2 cache of 60 MB
driver 1.2, torch 2.13.0, Triton 3.7.1
ceilings, measured before:  copy 4,300 GB/s (read + written), bf16 matmul 790 TFLOP/s
and again at the end:       copy 4,300 GB/s (read + written), bf16 matmul 790 TFLOP/s

                             time  spread       achieved  of ceiling  ratio   target  reached

paged_attention
  causal 1 x 16k, bf16    4.00 ms    1.2%  500.0 TFLOP/s       63.3%             65%       NO
    against SDPA flash    6.00 ms    1.2%  333.3 TFLOP/s       42.2%  1.50x    1.55x       NO
    against cuDNN        3.80 ms*    1.2%  526.3 TFLOP/s       66.6%  0.95x    0.92x      yes
    against varlen_attn                                                        1.20x
      failed: ImportError: not in this torch

mla
  decode                   270 us    1.2%     3,704 GB/s       86.1%             85%      yes
      note: a note

sampling
  greedy                  6.10 us    1.2%                                    5.00 us       NO
  top-p
      failed: OutOfMemoryError: all

moe
  decode                                                                         72%
      left out: the time budget was used up

* launched one by one, because a CUDA graph of it could not be captured
ratio: a peer's time over ours, so that above 1 ours is faster; spread: distance of the quartiles
2 of 5 targets reached; 2 could not be judged.
  missed: paged_attention, causal 1 x 16k, bf16: share of the matmul ceiling, wanted 0.65, got 0.633
  missed: paged_attention, causal 1 x 16k, bf16: times as fast as SDPA flash, wanted 1.55, got 1.5
  missed: sampling, greedy: microseconds, wanted 5, got 6.1
  not judged: paged_attention, causal 1 x 16k, bf16: times as fast as varlen_attn, wanted 1.2: \
ImportError: not in this torch
  not judged: moe, decode: share of the copy ceiling, wanted 0.72: the time budget was used up
1 of 5 measurements failed.
1 of 5 measurements were left out: the time budget was used up.
"""


def test_the_table():
    text = report.as_text(report.as_json(full_run(), date(2026, 1, 2), False))
    assert text == TABLE


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(0.8, "0.80 us"), (9.996, "10.0 us"), (99.96, "100 us"), (999.6, "1.00 ms"), (2e6, "2.00 s")],
)
def test_durations_have_three_digits(microseconds, text):
    assert report.duration(microseconds) == text


TIMING_KEYS = {"time_us", "spread", "repeats", "calls", "how", "gb_per_s", "tflop_per_s", "share"}
ROW_KEYS = TIMING_KEYS | {
    "family", "name", "bound", "num_bytes", "num_flops", "num_sets", "target", "reached", "peers",
    "error", "left_out", "notes",
}  # fmt: skip
PEER_KEYS = TIMING_KEYS | {"name", "ratio", "target", "reached", "error"}


def test_the_json_keeps_its_schema(tmp_path):
    whole = report.as_json(full_run(), date(2026, 1, 2), False)
    report.write(whole, tmp_path / "a.json")
    read = json.loads((tmp_path / "a.json").read_text())
    assert read == whole
    assert (read["schema"], read["date"], read["quick"]) == (1, "2026-01-02", False)
    assert read["gpu"] == FACTS
    for row in (*read["rows"], *read["ceilings"]["rows"]):
        assert set(row) == ROW_KEYS
        assert all(set(peer) == PEER_KEYS for peer in row["peers"])
    assert read["ceilings"]["copy_gb_per_s"] == pytest.approx(4300)
    assert read["ceilings"]["matmul_tflop_per_s"] == pytest.approx(790)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("old")
    with pytest.raises(ValueError, match="JSON compliant"):
        report.write({"value": math.nan}, file)
    assert file.read_text() == "old"
    report.write({"value": 1}, file)
    assert json.loads(file.read_text()) == {"value": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_names_of_gpus_become_file_names():
    assert report.slug("NVIDIA H200") == "nvidia-h200"
    assert report.slug("NVIDIA GeForce RTX 4090 (Laptop)") == "nvidia-geforce-rtx-4090-laptop"
    assert report.slug("../..") == "gpu"


# ---- the command ------------------------------------------------------------------------------


@pytest.fixture
def fakes(monkeypatch):
    """Two families of one measurement each; every worker measures all that is left of them."""
    monkeypatch.setattr(families, "measurements", lambda family, tiny=False: [case(f"{family} 1")])

    def start(job):
        script = [*OPENING, limits_event(), *measured(0), *measured(1), *measured(2)]
        return Scripted([*script, END], Clock())

    return start


def test_the_command_prints_a_table_and_writes_json(fakes, tmp_path, capsys):
    file = tmp_path / "found.json"
    code = cli.main(["mla", "moe", "--json", str(file)], fakes, lambda: None)
    out, err = capsys.readouterr()
    assert code == 0
    assert "against" not in out
    assert "1.00 ms" in out
    assert f"The numbers are in {file}." in out
    assert "s] mla: a" in err
    rows = json.loads(file.read_text())["rows"]
    assert [(row["family"], row["name"]) for row in rows] == NAMES


def test_results_go_to_the_notebooks_by_default(fakes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "RESULTS", tmp_path)
    assert cli.main(["mla"], fakes, lambda: None) == 0
    assert json.loads((tmp_path / "nvidia-h200.json").read_text())["gpu"] == FACTS


def test_a_failed_measurement_is_exit_code_1(fakes, tmp_path, capsys):
    def start(job):
        bad = result(0, timing=None, error="ValueError: x")
        return Scripted([*OPENING, begin(0), bad, END], Clock())

    assert cli.main(["mla", "--json", str(tmp_path / "a.json")], start, lambda: None) == 1
    assert "failed: ValueError: x" in capsys.readouterr().out


def no_gpu():
    raise NoGpuError("There is no GPU.")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["mlaa"],
            "There is no kernel family 'mlaa'; the families are paged_attention, .* mean mla?",
        ),
        (["mla", "--seconds", "0"], r"--seconds is 0\.0; it must be a number above 0"),
        (["mla", "--seconds", "nan"], "--seconds is nan"),
        (["mla"], "There is no GPU"),
    ],
)
def test_what_cannot_run_is_one_sentence_and_exit_code_2(fakes, arguments, sentence, capsys):
    assert cli.main(arguments, fakes, no_gpu) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert re.search(sentence, err)


def test_without_a_place_for_the_numbers_nothing_is_measured(fakes, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "RESULTS", tmp_path / "missing")
    assert cli.main(["mla"], fakes, lambda: None) == 2
    assert "say --json FILE" in capsys.readouterr().err
    assert cli.main(["mla", "--json", str(tmp_path / "no" / "a.json")], fakes, lambda: None) == 2
    assert "its folder does not exist" in capsys.readouterr().err


def test_list_needs_no_gpu(fakes, capsys):
    assert cli.main(["mla", "--list"], fakes, no_gpu) == 0
    assert capsys.readouterr().out == "mla\n  mla 1\n"


def test_list_falls_back_to_toy_sizes(monkeypatch, capsys):
    def measurements(family, tiny=False):
        if not tiny:
            raise AssertionError("Torch not compiled with CUDA enabled")
        return [case("small")]

    monkeypatch.setattr(families, "measurements", measurements)
    assert cli.main(["mla", "--list"]) == 0
    assert capsys.readouterr().out == "mla\n  small (toy size)\n"


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "python -m minillm_kernels.bench --quick" in out
    assert "exit codes" in out


def test_the_ceilings_are_what_they_say():
    """At toy sizes, on the CPU."""
    copy, matmul = ceilings(tiny=True)
    for index in range(copy.num_sets):
        copied = copy.run(index).clone()
        assert torch.equal(copy.peers["by a kernel"](index), ~copied)
    assert copy.num_bytes == 2 * 256
    assert matmul.run(0).shape == (16, 16)
    assert not torch.equal(matmul.run(0), matmul.run(1))
    assert matmul.num_flops == 2 * 16**3


def test_quick_is_shorter():
    assert QUICK.seconds < Effort().seconds
    assert QUICK.most < Effort().most
    assert cli.QUICK_SECONDS < 120
    assert cli.SECONDS + 60 < 8 * 60  # with the start and the last measurement
