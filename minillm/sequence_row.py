"""What a runner keeps of one sequence from step to step."""

from dataclasses import dataclass

from minillm.edits import SamplingRow
from minillm.scheduling.plan import NewSequence


@dataclass(slots=True)
class SequenceRow:
    """What the runner remembers of a sequence; `row` is its place in `DeviceRows`.

    `num_unread`: tokens that were sampled and are not in `token_ids` yet. `is_fed` says that the
    last token lies on the device, where the next step finds it.
    """

    row: int
    new: NewSequence
    token_ids: list[int]
    num_unread: int = 0
    is_fed: bool = False

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
