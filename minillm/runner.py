"""The runner: a plan becomes tensors, the model runs once, logits become tokens.

It keeps one row per running sequence between steps: the tokens, and the block table in a tensor on
the device. A plan says only what changed, so a step costs O(rows) list work and no rebuilding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from minillm.batches import BlockTables, make_batch, upload
from minillm.deterministic import TiledDecoder
from minillm.errors import MinillmError
from minillm.layers.batch import Batch
from minillm.layers.kv_cache import KVCache
from minillm.logprobs import TokenLogprob, token_logprobs
from minillm.models.decoder import Decoder
from minillm.sampler import SamplingRow, sample
from minillm.scheduling.plan import NewSequence, Row, StepPlan

T = TypeVar("T")


@dataclass(slots=True)
class SequenceRow:
    """What the runner remembers of a sequence; `row` is its place in the table of block tables."""

    row: int
    new: NewSequence
    token_ids: list[int]
    output_ids: list[int]
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
        self._sampling.position = len(self.token_ids)
        return self._sampling

    def _sampling_row(self, sample_index: int) -> SamplingRow:
        request = self.new.request
        return SamplingRow(
            params=request.params,
            seed=request.seed,
            sample_index=sample_index,
            position=len(self.token_ids),
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=self.output_ids,
            stop_ids=request.stop_ids,
            bad_words_ids=request.bad_words_ids,
        )


@dataclass(slots=True)
class StepResult:
    """What came out of a step, by seq_id.

    Attributes:
        token_ids: for each row with samples, that many tokens; None where one failed.
        logprobs: beside each token, what its request asked for.
        prompt_logprobs: the first position they predict, and one entry per position from there.
        errors: one sentence per failed sample; for a row that failed whole, only one.
    """

    token_ids: dict[int, list[int | None]] = field(default_factory=dict)
    logprobs: dict[int, list[dict[int, TokenLogprob] | None]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, list[dict[int, TokenLogprob]]]] = field(
        default_factory=dict
    )
    errors: dict[int, dict[int, str]] = field(default_factory=dict)

    def fail(self, row: Row, error: object) -> None:
        """A whole row failed: all of its samples."""
        self.token_ids[row.seq_id] = [None] * row.num_samples
        self.errors[row.seq_id] = dict.fromkeys(range(max(row.num_samples, 1)), str(error))


class Runner:
    """Owns the model, the cache on its device and the host's part of it.

    What goes wrong in one row, or in a pass over several of them, is isolated: the rows are run
    again one by one, and those that fail alone are reported in `StepResult.errors`.
    """

    def __init__(
        self,
        model: Decoder | TiledDecoder,
        kv: KVCache,
        host: KVCache | None,
        max_num_seqs: int,
        max_blocks: int,
    ):
        self.model, self.kv, self.host = model, kv, host
        # Whether the rows of a step may share anything but exact operations.
        self.row_by_row = isinstance(model, TiledDecoder)
        self.device = model.embedding.weight.device
        self._tables = BlockTables(max_num_seqs, max_blocks, self.device)
        self.reset()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan."""
        with torch.accelerator.device_index(self.device.index):  # where kernels are launched
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        result = StepResult()
        self._update_rows(plan)
        self._move_blocks(plan)
        for rows, hidden in self._attempt(plan.rows, self._forward, result):
            self._prompt_logprobs(rows, hidden, result)
            sampling = [row for row in rows if row.num_samples and row.seq_id not in result.errors]
            if sampling:
                self._sample(sampling, rows, hidden, result)
        return result

    def reset(self) -> None:
        """Forget all sequences."""
        self._rows: dict[int, SequenceRow] = {}
        self._free_rows = list(range(len(self._tables.host) - 1, -1, -1))

    # ---- what changed --------------------------------------------------------------------

    def _update_rows(self, plan: StepPlan) -> None:
        for seq_id in plan.dropped:
            self._free_rows.append(self._rows.pop(seq_id).row)
        for new in plan.new:
            self._rows[new.seq_id] = SequenceRow.of(self._free_rows.pop(), new)
        self._tables.write(
            [
                (self._rows[row.seq_id].row, row.num_kept, row.blocks)
                for row in plan.rows
                if row.blocks
            ]
        )

    def _move_blocks(self, plan: StepPlan) -> None:
        """In the order that the plan's docstring asks for."""
        if plan.swap_out and self.host is not None:
            self.kv.copy_blocks(plan.swap_out, self.host)
        if plan.copies:
            self.kv.copy_blocks(plan.copies, self.kv)
        if plan.swap_in and self.host is not None:
            self.host.copy_blocks(plan.swap_in, self.kv)

    # ---- the model -----------------------------------------------------------------------

    def _attempt(
        self, rows: Sequence[Row], run: Callable[[Sequence[Row]], T], result: StepResult
    ) -> list[tuple[Sequence[Row], T]]:
        """All rows together; where that fails, each alone. Writing a position twice is harmless."""
        try:
            return [(rows, run(rows))]
        except Exception as error:
            if len(rows) == 1:
                result.fail(rows[0], described(error))
                return []
        return [done for row in rows for done in self._attempt([row], run, result)]

    def _forward(self, rows: Sequence[Row]) -> Tensor:
        """Hidden states [N, d] of the rows' tokens, one row after another."""
        return self.model(self.batch(rows), self.kv)

    def batch(self, rows: Sequence[Row]) -> Batch:
        """The flat batch of these rows."""
        known = [self._rows[row.seq_id] for row in rows]
        input_ids: list[int] = []
        for state, row in zip(known, rows, strict=True):
            if row.num_tokens == 1:
                input_ids.append(state.token_ids[row.start])
            else:
                input_ids += state.token_ids[row.start : row.start + row.num_tokens]
        return make_batch(
            self._tables,
            self.kv.block_size,
            [state.row for state in known],
            [row.start for row in rows],
            [row.num_tokens for row in rows],
            input_ids,
        )

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return upload(self.device, np.array(values, dtype=np.int64))[0]

    # ---- tokens --------------------------------------------------------------------------

    def _sample(
        self, sampling: Sequence[Row], rows: Sequence[Row], hidden: Tensor, result: StepResult
    ) -> None:
        """Choose the next tokens of the rows that have reached their end, all at once."""
        indices = dict(zip((row.seq_id for row in rows), last_tokens(rows), strict=True))

        def run(part: Sequence[Row]) -> None:
            places = [indices[row.seq_id] for row in part for _ in range(row.num_samples)]
            # Nothing is picked where all of it is wanted: the rows of a step that only decodes.
            whole = len(places) == len(hidden) == len(part)
            wanted = hidden if whole else hidden[self._tensor(places)]
            self._take(part, self.model.logits(wanted), result)  # logits [K, V]

        self._attempt(sampling, run, result)

    def _take(self, rows: Sequence[Row], logits: Tensor, result: StepResult) -> None:
        """Sample, and append what was sampled to the sequence; forks get theirs when they come."""
        states = [self._rows[row.seq_id] for row in rows]
        sampled = sample(
            logits,
            [
                state.sampling_row(state.new.sample_index + each)
                for state, row in zip(states, rows, strict=True)
                for each in range(row.num_samples)
            ],
            self.row_by_row,
        )
        at = 0
        for state, row in zip(states, rows, strict=True):
            part = range(at, at + row.num_samples)
            at += row.num_samples
            errors = {i - part[0]: sampled.failed[i] for i in part if i in sampled.failed}
            tokens = [None if i in sampled.failed else sampled.token_ids[i] for i in part]
            result.token_ids[row.seq_id] = tokens
            result.logprobs[row.seq_id] = [sampled.logprobs[i] for i in part]
            if errors:
                result.errors[row.seq_id] = errors
            if tokens[0] is not None:
                state.token_ids.append(tokens[0])
                state.output_ids.append(tokens[0])

    def _prompt_logprobs(self, rows: Sequence[Row], hidden: Tensor, result: StepResult) -> None:
        """Log-probabilities of the prompt tokens that these rows predict, where they are wanted."""
        end = 0
        for row in rows:
            start, end = end, end + row.num_tokens
            request = self._rows[row.seq_id].new.request
            wanted = request.params.prompt_logprobs
            targets = request.prompt_token_ids[row.start + 1 : row.start + 1 + row.num_tokens]
            if wanted is None or not targets or self._rows[row.seq_id].new.sample_index:
                continue
            try:
                entries = token_logprobs(
                    self.model.logits,
                    hidden[start : start + len(targets)],
                    self._tensor(targets),
                    wanted,
                    row_by_row=self.row_by_row,
                )
                result.prompt_logprobs[row.seq_id] = row.start + 1, entries
            except Exception as error:
                result.fail(row, described(error))


def last_tokens(rows: Sequence[Row]) -> list[int]:
    """Where in the flat batch each row ends."""
    return [end - 1 for end in accumulate(row.num_tokens for row in rows)]


def described(error: Exception) -> str:
    """An error of ours as it is, another with its type, in one line."""
    if isinstance(error, MinillmError):
        return " ".join(str(error).split())
    return f"The model failed on this request: {in_one_line(error)}"


def in_one_line(error: BaseException) -> str:
    """Its type and the beginning of what it says."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
