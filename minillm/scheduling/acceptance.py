"""How often drafts are right: what the log, metrics and benchmarks say of speculative decoding.

    vllm:spec_decode_...                      counts
    num_drafts                                rows with drafts
    num_draft_tokens                          the drafts of all rows
    num_accepted_tokens                       drafts that became delivered tokens
    num_accepted_tokens_per_pos{position}     rows whose draft at this place did

A row yields its accepted drafts and one token more, the last, which counts as sampled even where it
was drafted, too. Tokens that follow a stop are cut and do not count as accepted.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from minillm.scheduling.record import Counters


class Acceptance(NamedTuple):
    """The counters of speculative decoding, in total or over an interval.

    Attributes:
        num_drafts: rows with drafts.
        num_draft_tokens: drafts of these rows.
        num_accepted_tokens: of these, that became tokens of a sequence.
        num_accepted_at: the same by place among the drafts of a row, the first place first.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_at: tuple[int, ...]

    @classmethod
    def of(cls, counters: "Counters") -> "Acceptance":
        """Since the engine started."""
        return cls(
            counters.num_drafts,
            counters.num_draft_tokens,
            counters.num_accepted_tokens,
            tuple(counters.num_accepted_at),
        )

    def since(self, before: "Acceptance") -> "Acceptance":
        """What was added after `before`."""
        known = before.num_accepted_at + (0,) * len(self.num_accepted_at)
        return Acceptance(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            tuple(now - then for now, then in zip(self.num_accepted_at, known, strict=False)),
        )

    @property
    def mean_length(self) -> float:
        """Tokens that a row with drafts yields: 1 + accepted / drafts, and 1 without any drafts."""
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1)

    @property
    def rate(self) -> float | None:
        """The share of drafted tokens that were accepted; None where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def rates_at(self) -> tuple[float, ...]:
        """For each place, the share of rows with drafts in which the draft there was accepted, and
        with it all before it: it never rises from place to place."""
        return tuple(count / max(self.num_drafts, 1) for count in self.num_accepted_at)
