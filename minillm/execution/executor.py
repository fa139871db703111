"""The executor interface: the boundary between scheduling and computation.

The scheduler needs only token counts; the engine gives its step plans to an executor. This holds
the model, the KV cache and the sampler, and returns tokens. `runner.Runner` executes in this
process. Plans and results are plain data (`wire.py`), so other executors can use other processes.
"""

from dataclasses import dataclass
from typing import Protocol

from minillm.execution.flight import Flight
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.record import StepRecord


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the scheduler may allocate: KV blocks on device and host, and rows of the batch."""

    num_blocks: int
    block_size: int
    num_host_blocks: int
    max_num_seqs: int


class Executor(Protocol):
    """Executes step plans in launch order."""

    def capacity(self) -> Capacity:
        """Numbers of blocks and rows, which never change."""

    def launch(self, plan: StepPlan) -> Flight:
        """Start a step without waiting. One earlier step may be uncollected, or with pipeline
        parallelism one fewer than there are stages."""

    def reset(self) -> None:
        """Remove all sequences; the next plan may not refer to them."""

    def stats(self) -> dict[str, int]:
        """Allocated bytes by use: weights, kv_cache, swap_space, activations, ..."""

    def close(self) -> None:
        """Free the memory. May be called twice."""


@dataclass(slots=True)
class Step:
    """One step from plan to commit. `flight` is None until the step is launched."""

    plan: StepPlan
    record: StepRecord
    flight: Flight | None = None

    def launch(self, executor: Executor) -> Flight:
        """Launch the step if it has not been launched, and return its flight."""
        if self.flight is None:
            self.flight = executor.launch(self.plan)
        return self.flight
