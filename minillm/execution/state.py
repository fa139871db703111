"""The state that a runner keeps for each sequence between steps."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm.models.batches import BlockTables
from minillm.models.trees import Tree
from minillm.scheduling.plan import NewSequence, Row


@dataclass(slots=True)
class SequenceRow:
    """The runner's state of one sequence."""

    row: int  # in `DeviceRows` and `Sampler`
    new: NewSequence
    token_ids: list[int]  # known to the host; without the tokens of a step in flight
    is_fed: bool = False  # whether the last token is in `DeviceRows.last`
    drafts: list[int] = field(default_factory=list)  # verified by the step in flight
    dist: Tensor | None = None  # [drafts, V], what the drafts were drawn from, if known
    tree: Tree | None = None  # of the drafts; None if each follows the one before

    def positions(self, start: int, end: int) -> Iterable[int]:
        """Positions of the tokens that a row samples, those of a chain from `start` to `end`."""
        return range(start, end) if self.tree is None else [start + d for d in self.tree.depths]


class DeviceRows:
    """Per-sequence state on the device, by row: its block table, and `last`, its last token."""

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device):
        self.num_rows, self.device = num_rows, device
        self.tables = BlockTables(num_rows, max_blocks, device)
        self.last = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def move(self, source: int, target: int) -> None:
        """Move a sequence to another row."""
        self.tables.host[target] = self.tables.host[source]
        if self.device.type != "cpu":
            self.tables.device[target] = self.tables.device[source]
        self.last[target] = self.last[source]


RowStates = list[tuple[Row, SequenceRow]]  # rows of a plan, each with its sequence
