"""What a runner keeps of one sequence from step to step."""

from dataclasses import dataclass, field

from torch import Tensor

from minillm.sampling.edits import SamplingRow
from minillm.scheduling.plan import NewSequence


@dataclass(slots=True)
class SequenceRow:
    """What the runner remembers of a sequence; `row` is its place in `DeviceRows`.

    `is_fed` says that the last token lies on the device, where the next step finds it, while it may
    not be in `token_ids` yet. `drafts` are the tokens that the step in flight verifies, and
    `law` what they were drawn from (`speculative/proposer.py`).
    """

    row: int
    new: NewSequence
    token_ids: list[int]
    is_fed: bool = False
    drafts: list[int] = field(default_factory=list)
    law: Tensor | None = None

    @classmethod
    def of(cls, row: int, new: NewSequence) -> "SequenceRow":
        """The row of a sequence that was just admitted, resumed or forked."""
        return cls(row, new, list(new.token_ids))

    def sampling_row(self) -> SamplingRow:
        """How to choose its tokens."""
        new, prompt = self.new, self.new.num_prompt_tokens
        return SamplingRow(
            params=new.params,
            seed=new.seed,
            sample_index=new.sample_index,
            position=len(self.token_ids),
            prompt_token_ids=self.token_ids[:prompt],
            output_token_ids=self.token_ids[prompt:],
            stop_ids=new.stop_ids,
            bad_words_ids=new.bad_words_ids,
        )
