"""A runner that keeps the final hidden states of its passes, which draft heads read."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from minillm.execution.flight import StepResult
from minillm.execution.runner import Group, Runner
from minillm.scheduling.plan import Row
from minillm.speculative.features import Features


class FeatureRunner(Runner):
    """A runner with `features`; their blocks are copied and swapped by the proposer."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        size = self.model.config.hidden_size
        self.features = Features(self.kv, self.host, self.rows.tables, size)
        self.by_slot = *self.kv.tensors, *self.features.pages.tensors

    def _forward(self, rows: Sequence[Row]) -> Tensor:
        batch = self.batch(rows)
        hidden = self.model(batch, self.kv)
        self.features.states.index_copy_(0, batch.slot_mapping, hidden)
        return hidden

    def _replay(self, rows: Sequence[Row], result: StepResult) -> Group | None:
        replayed = super()._replay(rows, result)
        if replayed is not None:
            rows, hidden = replayed
            spans = [(self._rows[row.seq_id].row, row.start, row.num_tokens) for row in rows]
            self.features.keep(spans, hidden)
        return replayed
