"""What a runner keeps of each sequence between steps: on the host, and on the device."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm.models.batches import BlockTables
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


class DeviceRows:
    """What the device keeps of every sequence from step to step, in its persistent row: its block
    table, and `last`, the token that was sampled last."""

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device):
        self.num_rows, self.device = num_rows, device
        self.tables = BlockTables(num_rows, max_blocks, device)
        self.last = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def move(self, source: int, target: int) -> None:
        """A sequence gets another row."""
        self.tables.host[target] = self.tables.host[source]
        if self.device.type != "cpu":
            self.tables.device[target] = self.tables.device[source]
        self.last[target] = self.last[source]
