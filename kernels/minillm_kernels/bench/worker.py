"""The process that measures; `minillm_kernels.bench.supervisor` starts it and reads its lines.

A kernel that reads outside of its memory ends every later call of its process, and one that hangs
ends nothing at all. Both may happen on a new GPU, and neither may cost more than one row of the
table: so what is measured and what waits are different processes. What it says are lines of JSON.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from minillm_kernels import families
from minillm_kernels.bench.case import Measurement
from minillm_kernels.bench.ceilings import ceilings
from minillm_kernels.bench.gpu import Gpu, Stopwatch
from minillm_kernels.bench.results import Result
from minillm_kernels.bench.runner import QUICK, Budget, Effort, described, measure_all

Event = dict[str, Any]
INPUTS = -1  # the "measurement" of making a family's inputs
AT_END = 3.0  # seconds kept for measuring the ceilings again


@dataclass(frozen=True)
class Job:
    """What a worker is to do.

    Attributes:
        families: in this order.
        seconds: for everything, from the worker's start.
        counts: measurements of each family, for sharing out the time; None to find out.
        start: where to go on in the first family: number of its first measurement.
        quick: a first impression instead of good medians.
        with_ceilings: whether to measure them first; at the end they are measured in any case.
    """

    families: tuple[str, ...]
    seconds: float
    counts: Mapping[str, int] | None = None
    start: int = 0
    quick: bool = False
    with_ceilings: bool = True

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """What `to_json` wrote."""
        data = json.loads(text)
        return cls(**{**data, "families": tuple(data["families"])})


def work(
    job: Job,
    gpu: Stopwatch,
    clock: Callable[[], float],
    load: Callable[[str], list[Measurement]] = families.measurements,
    limits: Callable[[], list[Measurement]] = ceilings,
) -> Iterator[Event]:
    """Everything a worker says: what it begins, what it found, and at last that it ended.

    It stops early where the GPU is lost to this process, after the result that lost it.
    """
    effort = QUICK if job.quick else Effort()
    end = clock() + job.seconds
    counts = job.counts
    if counts is None:
        names = {family: _names(family, gpu, load) for family in job.families}
        counts = {family: len(found) for family, found in names.items()}
        yield {"event": "plan", "names": names}
    if job.with_ceilings:
        yield from _ceilings("ceilings", gpu, Budget(clock, end, 10), limits)
    budget = Budget(clock, end - AT_END, 0)
    for number, family in enumerate(job.families):
        start = job.start if number == 0 else 0
        after = sum(counts.get(name, 0) for name in job.families[number + 1 :])
        budget.left = max(counts.get(family, 0) - start, 0) + after
        for event in _family(family, start, gpu, budget, effort, load):
            yield event
            if event["event"] == "result" and failed(event["result"]) and gpu.lost():
                return
    if clock() + AT_END / 2 < end:
        yield from _ceilings("ceilings at the end", gpu, Budget(clock, end, 2), limits)
    yield {"event": "end"}


def _names(family: str, gpu: Stopwatch, load: Callable[[str], list[Measurement]]) -> list[str]:
    """What a family will measure; nothing if its inputs cannot be made, which is said later."""
    try:
        return [measurement.name for measurement in load(family)]
    except Exception:
        return []
    finally:
        gpu.free()


def failed(result: Mapping[str, Any]) -> bool:
    """Whether a measurement or one of its peers ended in an error."""
    return bool(result["error"]) or any(peer["error"] for peer in result["peers"])


def _ceilings(
    name: str, gpu: Stopwatch, budget: Budget, limits: Callable[[], list[Measurement]]
) -> Iterator[Event]:
    effort = Effort(least=5, most=40, seconds=2.5)
    yield {"event": "begin", "family": name, "index": INPUTS, "name": "device copy and matmul"}
    found = [result.to_json() for result in measure_all(limits(), gpu, budget, effort)]
    yield {"event": name, "results": found}
    gpu.free()


def _family(
    family: str,
    start: int,
    gpu: Stopwatch,
    budget: Budget,
    effort: Effort,
    load: Callable[[str], list[Measurement]],
) -> Iterator[Event]:
    """The measurements of one family from number `start` on."""
    yield {"event": "begin", "family": family, "index": INPUTS, "name": "inputs"}
    try:
        measurements = load(family)[start:]
    except Exception as error:
        result = Result.unmeasured(family, "inputs", error=described(error))
        yield {"event": "result", "family": family, "index": INPUTS, "result": result.to_json()}
        return
    for index in itertools.count(start):
        if not measurements:
            break
        measurement = measurements.pop(0)  # whose inputs are given back when it is done
        yield {"event": "begin", "family": family, "index": index, "name": measurement.name}
        (result,) = measure_all([measurement], gpu, budget, effort)
        del measurement
        gpu.free()
        yield {"event": "result", "family": family, "index": index, "result": result.to_json()}


def main() -> None:
    """Do the job on the command line; events go to standard output, everything else to errors."""
    job = Job.from_json(sys.argv[1])
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    gpu = Gpu()
    _send(lines, {"event": "gpu", "gpu": gpu.facts()})
    for event in work(job, gpu, time.monotonic):
        _send(lines, event)


def _send(lines: Any, event: Event) -> None:
    lines.write(json.dumps(event) + "\n")
    lines.flush()


if __name__ == "__main__":
    main()
