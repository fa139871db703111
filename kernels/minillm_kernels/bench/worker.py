"""The process that measures; `minillm_kernels.bench.supervisor` starts it and reads its lines.

A kernel that reads outside of its memory ends every later call of its process, and one that hangs
ends nothing at all. Both may happen on a new GPU, and neither may cost more than one row of the
table: so what is measured and what waits are different processes. What it says are lines of JSON.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
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
CEILINGS = -1  # the "measurement" of both ceilings
AT_END = 3.0  # seconds kept for measuring the ceilings again


@dataclass(frozen=True)
class Job:
    """What a worker is to do.

    Attributes:
        families: whose measurements; those with a target come first, in case time gets short.
        seconds: for everything, from the worker's start.
        start: number of the measurement to begin with, where the last worker ended.
        quick: a first impression instead of good medians.
        first: whether it is the first worker, which measures the ceilings and says what is broken;
            at the end every worker measures the ceilings.
    """

    families: tuple[str, ...]
    seconds: float
    start: int = 0
    quick: bool = False
    first: bool = True

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
    todo, broken = arranged(job.families, load)
    yield {"event": "plan", "names": [(each.family, each.name) for each in todo]}
    if job.first:
        yield from ({"event": "broken", "result": each.to_json()} for each in broken)
        yield from _ceilings("ceilings", gpu, Budget(clock, end, 10), limits)
    budget = Budget(clock, end - AT_END, len(todo) - job.start)
    for index, (family, name) in enumerate([(each.family, each.name) for each in todo]):
        measurement = todo.pop(0)
        if index < job.start:
            continue
        yield {"event": "begin", "family": family, "index": index, "name": name}
        (result,) = measure_all([measurement], gpu, budget, effort)
        del measurement  # and its inputs
        gpu.free()
        yield {"event": "result", "index": index, "result": result.to_json()}
        if failed(result) and gpu.lost():
            return
    if clock() + AT_END / 2 < end:
        yield from _ceilings("ceilings at the end", gpu, Budget(clock, end, 2), limits)
    yield {"event": "end"}


def arranged(
    names: Sequence[str], load: Callable[[str], list[Measurement]]
) -> tuple[list[Measurement], list[Result]]:
    """All measurements of these families, those with targets first; and families that fail.

    A measurement makes its inputs when it first runs, so having all of them costs no memory.
    """
    found: list[Measurement] = []
    broken = []
    for family in names:
        try:
            found += load(family)
        except Exception as error:
            broken.append(Result.unmeasured(family, "everything", error=described(error)))
    aims = [each.target is not None or bool(each.peer_targets) for each in found]
    first = [each for each, aim in zip(found, aims, strict=True) if aim]
    return first + [each for each, aim in zip(found, aims, strict=True) if not aim], broken


def failed(result: Result) -> bool:
    """Whether a measurement or one of its peers ended in an error."""
    return bool(result.error) or any(peer.error for peer in result.peers)


def _ceilings(
    name: str, gpu: Stopwatch, budget: Budget, limits: Callable[[], list[Measurement]]
) -> Iterator[Event]:
    effort = Effort(least=5, most=40, seconds=2.5)
    yield {"event": "begin", "family": name, "index": CEILINGS, "name": "device copy and matmul"}
    found = [result.to_json() for result in measure_all(limits(), gpu, budget, effort)]
    yield {"event": name, "results": found}
    gpu.free()


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
