"""A runner that keeps the final hidden states of its passes, which draft heads read."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from minillm.execution.flight import StepResult
from minillm.execution.runner import Runner
from minillm.scheduling.plan import Row
from minillm.speculative.features import Features


class FeatureRunner(Runner):
    """A runner with `features`; their blocks are copied and swapped by the proposer."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        size = self.model.config.hidden_size
        self.features = Features(self.kv, self.host, self.rows.tables, size)
        self.by_slot = *self.kv.tensors, *self.features.pages.tensors

    def _passes(
        self, rows: Sequence[Row], result: StepResult
    ) -> list[tuple[Sequence[Row], Tensor]]:
        found = super()._passes(rows, result)
        for group, hidden in found:
            spans = [(self._rows[row.seq_id].row, row.start, row.num_tokens) for row in group]
            self.features.keep(spans, hidden)
        return found
