"""What the scheduler decides, as plain data for the executor (`execution/wire.py`: as bytes).
`record.py` has the same for people."""

from dataclasses import dataclass, field
from typing import NamedTuple

from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockCopy


class Row(NamedTuple):
    """Tokens of one sequence to compute now: positions `start` to `start + num_tokens`.

    Logits are computed at the last `num_logits` of them: none after a chunk that does not reach the
    end of what is known, one as a rule, k + 1 to verify k drafted tokens. `num_forks` further
    completions part from the sequence here, each with a token of its own from the last logits.
    The block table is the first `num_kept` blocks of the last step, then `blocks`.
    """

    seq_id: int
    start: int
    num_tokens: int
    num_logits: int
    num_forks: int
    num_kept: int
    blocks: tuple[int, ...] = ()

    @property
    def num_samples(self) -> int:
        """Tokens that are sampled: one at each of the logits, and one for each fork."""
        return self.num_logits + self.num_forks

    def end_after(self, num_accepted: int) -> int:
        """Where the valid positions end once so many sampled tokens are accepted: positions of
        rejected drafts are computed again, with other tokens."""
        end = self.start + self.num_tokens
        return end if num_accepted >= self.num_logits else end - self.num_logits + num_accepted


class NewSequence(NamedTuple):
    """A sequence that the executor does not know: admitted, resumed or forked since the last step.

    Its tokens so far, of which the first `num_prompt_tokens` are the prompt; which completion of
    its request it is; and how to choose its tokens, as in `Request`.
    """

    seq_id: int
    sample_index: int
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class StepPlan:
    """One step. Per sequence it holds only what changed, so it is small and can be sent anywhere.

    The order matters: forget `dropped`, copy `swap_out` (device, host), then `copies`, then
    `swap_in` (host, device), then compute `rows`, of which those with one token come first. A
    block that one of these frees may be the target of the next. A row may read blocks that a row
    before it writes, and if it has one token only, it comes among the others for that. First of
    all, experts move to placement number `rebalance`, unless it is 0, and stages of a pipeline that
    choose no tokens add those that were `learned` since the last plan, by seq_id. A joint plan of
    several copies of the model has the `shares` of each, which are sent (`data_parallel.py`).
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
