"""What the scheduler decides, as plain data: a plan for the runner, a record for people."""

from dataclasses import dataclass, field
from typing import NamedTuple

from minillm.cache.manager import BlockCopy
from minillm.scheduling.request import Request, Sequence


class Row(NamedTuple):
    """Tokens of one sequence to compute now: positions `start` to `start + num_tokens`.

    Its block table is the first `num_kept` blocks of the last step, then `blocks`.
    `num_samples` tokens follow the last position: none after a chunk that does not reach the end
    of what is known, several where the completions of a request part.
    """

    seq_id: int
    start: int
    num_tokens: int
    num_samples: int
    num_kept: int
    blocks: tuple[int, ...] = ()


class NewSequence(NamedTuple):
    """A sequence that the runner does not know: admitted, resumed or forked since the last step."""

    seq_id: int
    request: Request
    sample_index: int
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class StepPlan:
    """One step. Per sequence it holds only what changed, so it is small and can be sent anywhere.

    The order matters: forget `dropped`, copy `swap_out` (device, host), then `copies`, then
    `swap_in` (host, device), then compute `rows`, of which those with one token come first. A
    block that one of these frees may be the target of the next.
    """

    step: int
    dropped: list[int] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Blocked:
    """Why the next waiting sequence was not admitted; all others wait behind it.

    `what` it lacks is "seats" (of `max_num_seqs`), "tokens" (of the step's budget) or "blocks":
    none at all in a step in which those who run were short of them.
    """

    seq_id: int
    request_id: str
    what: str
    needed: int
    available: int

    @classmethod
    def of(cls, sequence: Sequence, what: str, needed: int, available: int) -> "Blocked":
        """The same about a given sequence."""
        return cls(sequence.seq_id, sequence.request.request_id, what, needed, available)

    def __str__(self) -> str:
        return f"no {self.what}: needs {self.needed}, has {max(self.available, 0)}"


class Preemption(NamedTuple):
    """Who lost its blocks, for whom, and whether they went to host memory ("swap") or not."""

    seq_id: int
    for_seq_id: int
    mode: str
    num_tokens: int  # that were computed so far


@dataclass(slots=True)
class StepRecord:
    """What one step did and why, in numbers that reconcile with the scheduler's counters."""

    step: int
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    admitted: list[int] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    stalled: list[int] = field(default_factory=list)  # running, but without a block or budget
    blocked: Blocked | None = None
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the start. Tokens reused after a preemption are no prefix hits."""

    num_steps: int = 0
    num_mixed_steps: int = 0  # with prefill and decode
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_prompt_tokens: int = 0  # of admitted requests
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    max_num_running: int = 0
