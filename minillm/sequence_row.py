"""What a runner keeps of one sequence from step to step."""

from dataclasses import dataclass

from minillm.sampler import SamplingRow
from minillm.scheduling.plan import NewSequence


@dataclass(slots=True)
class SequenceRow:
    """What the runner remembers of a sequence; `row` is its place in `DeviceRows`.

    `num_unread` tokens more were chosen than are in `token_ids`; `is_fed` says that the last one
    lies on the device, where the next step finds it.
    """

    row: int
    new: NewSequence
    token_ids: list[int]
    output_ids: list[int]
    num_unread: int = 0
    is_fed: bool = False
    _sampling: SamplingRow | None = None

    @classmethod
    def of(cls, row: int, new: NewSequence) -> "SequenceRow":
        """The row of a sequence that was just admitted, resumed or forked."""
        tokens = list(new.token_ids)
        return cls(row, new, tokens, tokens[len(new.request.prompt_token_ids) :])

    def sampling_row(self, sample_index: int) -> SamplingRow:
        """How to choose its next token. The same object in every step, for its own completion."""
        if sample_index != self.new.sample_index:
            return self._sampling_row(sample_index)
        if self._sampling is None:
            self._sampling = self._sampling_row(sample_index)
        self._sampling.position = len(self.token_ids) + self.num_unread
        return self._sampling

    def needs_host(self) -> str:
        """What its next token takes that only the host can do; "" if that is nothing."""
        if self.new.request.params.logprobs is not None:
            return "logprobs"
        edits = self.sampling_row(self.new.sample_index).edits
        return "masks, biases or penalties" if edits else ""

    def _sampling_row(self, sample_index: int) -> SamplingRow:
        request = self.new.request
        return SamplingRow(
            params=request.params,
            seed=request.seed,
            sample_index=sample_index,
            position=len(self.token_ids) + self.num_unread,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=self.output_ids,
            stop_ids=request.stop_ids,
            bad_words_ids=request.bad_words_ids,
        )
