"""Stages "smoke", "kernels", "memcheck" and "rest": the kernels alone, family by family.

Each case of `minillm_kernels.check` compares one call with float64, or bit for bit; each
measurement of `minillm_kernels.bench` times one call beside its peers.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from typing import Any

import torch

from minillm.lab.gpu.worker import Case, Context
from minillm_kernels import families
from minillm_kernels.check.case import Mismatch

SMALLEST = 6  # cases under compute-sanitizer, which is slow


def cases(context: Context) -> list[Case]:
    """Of one family."""
    torch.manual_seed(0)
    if context.stage == "kernels":
        return measurements(context)
    module = families.checks(context.task)
    some = sorted(module.CASES, key=lambda case: "float32" in repr(case))  # half precision first
    if context.stage == "memcheck":
        few = sorted(some, key=size)[:SMALLEST]
        return [Case(named(each), checked(module.verify, each, context)) for each in few]
    if context.stage == "rest":
        left = max(context.end - time.monotonic(), 0.0)
        return [Case("random cases", lambda: others(module, context), left)]
    cases = [Case(named(each), checked(module.verify, each, context)) for each in some]
    if invariant := getattr(module, "verify_invariant", None):
        bitwise = [(f"bitwise {named(each)}", each) for each in some]
        cases += [Case(name, checked(invariant, each, context)) for name, each in bitwise]
    return cases


def named(case: Any) -> str:
    """A case as one line that is the same in every run."""
    return repr(case).replace("torch.", "")


def size(case: Any) -> int:
    """The sum of all numbers of a case: small for small tensors."""

    def numbers(value: Any) -> Iterator[int]:
        if isinstance(value, int):
            yield int(value)
        elif isinstance(value, tuple | list):
            for item in value:
                yield from numbers(item)

    return sum(numbers(astuple(case)))


def checked(verify: Callable[[Any, str], None], case: Any, context: Context) -> Callable:
    """A call of `verify`. In a dry run nothing was computed, so nothing is compared."""

    def run() -> None:
        try:
            verify(case, context.device)
        except Mismatch:
            if not context.dry:
                raise

    return run


def others(module: Any, context: Context) -> dict[str, Any]:
    """Random cases until the time is nearly over; the message of a failure has its seed."""
    count = 0
    while count < 4 if context.dry else time.monotonic() < context.end - 3:
        case = module.random_case(random.Random(count))
        try:
            checked(module.verify, case, context)()
        except Mismatch as error:
            raise Mismatch(f"seed {count}, {named(case)}: {error}") from error
        count += 1
    return {"figures": {"random cases": count}}


def measurements(context: Context) -> list[Case]:
    """Of one family, those with a target first, each in its share of the time. Each is forgotten
    with its tensors once it was timed."""
    cases = families.measurements(context.task, tiny=context.dry)
    cases.sort(key=lambda each: each.target is None and not each.peer_targets)
    names, todo = [case.name for case in cases], dict(enumerate(cases))
    for done in range(context.start):
        del todo[done]
    return [Case(name, partial(timed, todo, i, context)) for i, name in enumerate(names)]


def timed(todo: dict[int, Any], index: int, context: Context) -> dict[str, Any]:
    """A row: `minillm_kernels.bench.measure`."""
    share = (context.end - time.monotonic()) / len(todo)
    measurement = todo.pop(index)
    if context.dry:
        measurement.run(0)
        return {}
    from minillm_kernels.bench.gpu import Gpu
    from minillm_kernels.bench.measure import Effort, measure

    gpu = Gpu()
    try:
        row = measure(measurement, gpu, Effort(seconds=min(max(share, 0.5), 1.5)))
    finally:
        del measurement
        gpu.free()
    return row | {"figures": {"us": row["time_us"], "GB/s": row["gb_per_s"]}}
