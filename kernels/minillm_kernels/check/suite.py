"""The cases of one kernel family, one after another, on one device."""

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from minillm_kernels.check.second_opinion import DTYPES, JUDGES
from minillm_kernels.families import checks

FEWEST_RANDOM = 3  # random cases, however long the others took


@dataclass(frozen=True)
class Outcome:
    """What became of a family.

    Attributes:
        num_cases: edges that were tried, and attention beside torch's own; num_invariant: those
            compared bit for bit.
        num_random: other cases, with the seeds 0, 1, ...
        failures: the case and what was wrong, one text each.
    """

    family: str
    num_cases: int
    num_invariant: int
    num_random: int
    failures: tuple[str, ...]
    seconds: float

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Outcome":
        """The opposite of `to_json`."""
        values = json.loads(line)
        return cls(**values | {"failures": tuple(values["failures"])})


def run_family(
    family: str, device: str, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Outcome:
    """All cases of a family, then random ones until `seconds` have passed.

    A failing case does not stop the others; an error of the GPU itself does, because after it every
    call fails.
    """
    module, start = checks(family), clock()
    failures: list[str] = []

    def tried(verify: Callable[[Any, str], None], cases: Iterator[object]) -> int:
        count = 0
        for case in cases:
            count += 1
            try:
                verify(case, device)
            except Exception as error:
                failures.append(f"{case}: {type(error).__name__}: {error}")
                if is_fatal(error):
                    break
        return count

    num_cases = tried(module.verify, iter(module.CASES))
    if family in JUDGES:
        num_cases += tried(JUDGES[family], iter(DTYPES))
    invariant = getattr(module, "verify_invariant", None)
    num_invariant = tried(invariant, iter(module.CASES)) if invariant and not failures else 0

    def others() -> Iterator[object]:
        seed = 0
        while seed < FEWEST_RANDOM or clock() - start < seconds:
            yield module.random_case(random.Random(seed))
            seed += 1

    num_random = 0 if failures else tried(module.verify, others())
    return Outcome(family, num_cases, num_invariant, num_random, tuple(failures), clock() - start)


def is_fatal(error: Exception) -> bool:
    """Whether the GPU's context is lost: nothing after it means anything."""
    text = str(error)
    return "CUDA error" in text or "Triton Error [CUDA]" in text
