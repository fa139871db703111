"""The scheduler's output: a `StepPlan` tells the executor what one step computes.

It is plain data, which `execution/wire.py` encodes for other processes. `record.py` describes the
same step for traces and metrics.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockCopy, Count


class Row(NamedTuple):
    """The tokens of one sequence that a step computes: positions `start` to `start + num_tokens`.

    Logits are computed at the last `num_logits` positions: 1 if the row reaches the last known
    token, k + 1 to verify k drafted tokens, 0 for an earlier prefill chunk or with max_tokens=0.

    `num_forks` other completions of the request fork from the sequence after this row. Each samples
    its first token from the row's last logits. The row's block table is the first `num_kept` blocks
    of the sequence's previous row, followed by `blocks`.
    """

    seq_id: Count
    start: Count
    num_tokens: Count
    num_logits: Count
    num_forks: Count
    num_kept: Count
    blocks: tuple[Count, ...] = ()

    @property
    def num_samples(self) -> int:
        """Tokens to sample: one per position with logits, and one per fork."""
        return self.num_logits + self.num_forks

    def end_after(self, num_accepted: int) -> int:
        """The end of the valid positions if `num_accepted` of the sampled tokens are accepted.

        Positions of rejected drafts are computed again, with other tokens.
        """
        end = self.start + self.num_tokens
        return end if num_accepted >= self.num_logits else end - self.num_logits + num_accepted


class NewSequence(NamedTuple):
    """A sequence that is new to the executor: admitted, resumed or forked since the last plan.

    `token_ids` are the prompt (`num_prompt_tokens`) and the tokens generated so far; `sample_index`
    numbers the completions of a request. The other fields are those of `Request`.
    """

    seq_id: int
    sample_index: int
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    cache_salt: str = ""


@dataclass(slots=True)
class StepPlan:
    """One step: what changed since the last plan, and the rows to compute.

    The executor applies the attributes in the order of this list, because a block that one step of
    it frees may be the target of the next.

    Attributes:
        rebalance: number of the expert placement to change to; 0 keeps the current one.
        learned: tokens sampled since the last plan, by seq_id; for stages that have no sampler.
        dropped: seq_ids of sequences to forget.
        new: sequences to add.
        swap_out: block copies (device, host).
        copies: block copies on the device (copy-on-write).
        swap_in: block copies (host, device).
        rows: rows to compute, those of one token first. Exception: a row that reads blocks written
            by another row of this plan comes after that row.
        shares: with data parallelism, the plan of each model copy (`data_parallel.py`).
    """

    step: int
    dropped: list[int] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    learned: dict[int, list[int]] = field(default_factory=dict)
    rebalance: int = 0
    shares: list["StepPlan"] = field(default_factory=list)
