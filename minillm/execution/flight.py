"""A launched step whose results are read later (a future)."""

from collections.abc import Callable
from dataclasses import dataclass, field

from minillm.errors import Failure
from minillm.sampling.logprobs import NOT_FINITE, TokenLogprob
from minillm.scheduling.plan import Row
from minillm.scheduling.record import RankTime


@dataclass(slots=True)
class StepResult:
    """The result of a step. Dictionaries are keyed by seq_id.

    Attributes:
        token_ids: for each row with logits its new tokens (accepted drafts included), or one token
            per completion if the row forks; None for a failed sample.
        logprobs: log-probabilities of each token, for requests with `logprobs`.
        prompt_logprobs: the first prompt position, and one entry per position from it on.
        errors: sample index -> failure. If a row fails, all its samples have the same one.
        suspect: rows whose KV may be wrong, because the forward pass failed or its logits are not
            finite. A row whose logits processors exclude every token is not suspect.
    """

    token_ids: dict[int, list[int | None]] = field(default_factory=dict)
    logprobs: dict[int, list[dict[int, TokenLogprob] | None]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[dict[int, TokenLogprob]]]] = field(
        default_factory=dict
    )
    errors: dict[int, dict[int, Failure]] = field(default_factory=dict)
    suspect: set[int] = field(default_factory=set)
    num_drafted: dict[int, int] = field(default_factory=dict)  # drafts verified
    graph_rows: int = 0  # batch size of the replayed CUDA graph; 0 for an eager step
    why_eager: str = ""  # why no graph was replayed, if the runner has graphs
    ranks: list[RankTime] = field(default_factory=list)  # times of each rank

    def fail(self, row: Row, error: Failure) -> None:
        """Record that all samples of a row failed."""
        self.token_ids[row.seq_id] = [None] * row.num_samples
        self.errors[row.seq_id] = dict.fromkeys(range(max(row.num_samples, 1)), error)
        self.suspect.add(row.seq_id)

    def fail_samples(self, row: Row, errors: dict[int, Failure]) -> None:
        """Record that some samples of a row failed."""
        self.errors[row.seq_id] = errors
        if NOT_FINITE in errors.values():
            self.suspect.add(row.seq_id)


@dataclass(slots=True)
class Flight:
    """A launched step. Each function in `reads` waits for the device and fills part of `result`;
    samples are also appended to `SequenceRow.token_ids` then (`collect.py`)."""

    result: StepResult = field(default_factory=StepResult)
    reads: list[Callable[[], None]] = field(default_factory=list)

    def collect(self) -> StepResult:
        """Wait for the step and return its result. Collect flights in launch order."""
        for read in self.reads:
            read()
        self.reads = []
        return self.result
