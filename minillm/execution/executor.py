"""What an engine needs of whatever computes: the seam between deciding and computing.

The engine decides with counts (`scheduling/`) and sends plans; an executor holds the model, the
cache and the sampler, and answers with tokens. `runner.Runner` is one in this process. Plans and
results are plain data (`execution/wire.py`), so that another may be in other processes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from minillm.errors import MinillmError
from minillm.execution.flight import Flight
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.record import StepRecord


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a scheduler may give out: blocks of the cache and of host memory, and rows."""

    num_blocks: int
    block_size: int
    num_host_blocks: int
    max_num_seqs: int


class Executor(Protocol):
    """Carries out plans, in the order in which they are launched."""

    def capacity(self) -> Capacity:
        """What there is; constant."""
        ...

    def launch(self, plan: StepPlan) -> Flight:
        """Start a step. Those of one stage may have one other that is not collected, those of a
        pipeline as many as it has stages."""
        ...

    def reset(self) -> None:
        """Forget all sequences; the next plan knows of none."""
        ...

    def stats(self) -> dict[str, int]:
        """Bytes that are really allocated: weights, kv_cache, swap_space, activations, ..."""
        ...

    def close(self) -> None:
        """Give the memory back. Closing twice is fine."""
        ...


@runtime_checkable
class Mortal(Protocol):
    """An executor that can also fail between steps, as other processes can."""

    def when_dead(self, tell: Callable[[MinillmError], None]) -> None:
        """Have `tell` called, by any thread, when it has failed."""
        ...


@dataclass(slots=True)
class Step:
    """One step, from its plan to its commit; no flight before it is launched."""

    plan: StepPlan
    record: StepRecord
    flight: Flight | None = None

    def launch(self, executor: Executor) -> Flight:
        """Start it, unless it was started before."""
        if self.flight is None:
            self.flight = executor.launch(self.plan)
        return self.flight
