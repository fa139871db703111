"""Acceptance of drafted tokens: the statistics of speculative decoding in logs and metrics.

    vllm:spec_decode_...                      counts
    num_drafts                                rows with drafts
    num_draft_tokens                          drafted tokens of these rows
    num_accepted_tokens                       drafted tokens that were accepted
    num_accepted_tokens_per_pos{position}     rows whose draft at this position was accepted

A row yields its accepted drafts and one sampled token. Tokens behind a stop token or stop string
are discarded and do not count; the last token that remains counts as the sampled one.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from minillm.scheduling.record import Counters


class Acceptance(NamedTuple):
    """The counters of speculative decoding, in total or over an interval.

    Attributes:
        num_drafts: rows with drafts.
        num_draft_tokens: drafted tokens of these rows.
        num_accepted_tokens: accepted drafted tokens.
        num_accepted_at: accepted drafted tokens by draft position.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_at: tuple[int, ...]

    @classmethod
    def of(cls, counters: "Counters") -> "Acceptance":
        """Totals since the engine started."""
        return cls(
            counters.num_drafts,
            counters.num_draft_tokens,
            counters.num_accepted_tokens,
            tuple(counters.num_accepted_at),
        )

    def since(self, before: "Acceptance") -> "Acceptance":
        """The counts since `before`."""
        known = before.num_accepted_at + (0,) * len(self.num_accepted_at)
        return Acceptance(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            tuple(now - then for now, then in zip(self.num_accepted_at, known, strict=False)),
        )

    @property
    def mean_length(self) -> float:
        """Mean acceptance length, 1 + accepted / drafts: mean tokens per row with drafts."""
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1)

    @property
    def rate(self) -> float | None:
        """Share of drafted tokens that were accepted; None if there are none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def rates_at(self) -> tuple[float, ...]:
        """Acceptance rate by draft position: the share of rows with drafts in which this draft, and
        so all before it, was accepted."""
        return tuple(count / max(self.num_drafts, 1) for count in self.num_accepted_at)
