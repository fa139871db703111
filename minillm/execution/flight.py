"""A launched step whose results are read later (a future)."""

from collections.abc import Callable
from dataclasses import dataclass, field

from minillm.sampling.logprobs import NOT_FINITE, TokenLogprob
from minillm.scheduling.plan import Row
from minillm.scheduling.record import RankTime


@dataclass(slots=True)
class StepResult:
    """What came out of a step, by seq_id.

    Attributes:
        token_ids: for each row with logits, the accepted tokens, any number; for a row that forks,
            one for each completion. None where a sample failed.
        logprobs: beside each token, what its request asked for.
        prompt_logprobs: the first position they predict, and one entry per position from there.
        errors: one sentence per failed sample; for a row that failed whole, only one.
        suspect: rows whose keys and values may be wrong: the pass failed, or its logits are not
            finite. A row that fails by its own mask has right ones.
        num_drafted: for each row that had drafts, how many.
        graph_rows: size of the graph that was replayed; 0 if none was.
        why_eager: why none was, where there are graphs.
        ranks: how long each rank took, where there are several.
    """

    token_ids: dict[int, list[int | None]] = field(default_factory=dict)
    logprobs: dict[int, list[dict[int, TokenLogprob] | None]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[dict[int, TokenLogprob]]]] = field(
        default_factory=dict
    )
    errors: dict[int, dict[int, str]] = field(default_factory=dict)
    suspect: set[int] = field(default_factory=set)
    num_drafted: dict[int, int] = field(default_factory=dict)
    graph_rows: int = 0
    why_eager: str = ""
    ranks: list[RankTime] = field(default_factory=list)

    def fail(self, row: Row, error: object) -> None:
        """A whole row failed: all of its samples."""
        self.token_ids[row.seq_id] = [None] * row.num_samples
        self.errors[row.seq_id] = dict.fromkeys(range(max(row.num_samples, 1)), str(error))
        self.suspect.add(row.seq_id)

    def fail_samples(self, row: Row, errors: dict[int, str]) -> None:
        """Some samples of a row failed, after a pass that went well."""
        self.errors[row.seq_id] = errors
        if NOT_FINITE in errors.values():
            self.suspect.add(row.seq_id)


@dataclass(slots=True)
class Flight:
    """What the device computes, or has computed; each of `reads` waits and completes the result."""

    result: StepResult = field(default_factory=StepResult)
    reads: list[Callable[[], None]] = field(default_factory=list)

    def collect(self) -> StepResult:
        """Wait for the tokens. Flights are collected in the order in which they were launched."""
        for read in self.reads:
            read()
        self.reads = []
        return self.result
