"""The runner: a plan becomes tensors, the model runs once, logits become tokens.

It keeps one row per running sequence between steps: the tokens, and the block table in a tensor on
the device. A plan says only what changed, so a step costs O(rows) list work and no rebuilding.

`launch` starts a step and `Flight.collect` waits for its tokens; between the two the next one may
be launched. It needs no token of the first: those stay on the device (`DeviceRows.last`), unless
something must be computed from them here, such as a penalty.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from minillm import ops
from minillm.batches import DeviceRows, make_batch, upload
from minillm.deterministic import TiledDecoder
from minillm.device_sampler import DeviceSampler, truncated
from minillm.errors import MinillmError
from minillm.flight import Flight, StepResult
from minillm.graphs import Capture, DecodeGraphs, read_later
from minillm.layers.batch import Batch
from minillm.layers.kv_cache import KVCache
from minillm.logprobs import failure_of, token_logprobs
from minillm.models.decoder import Decoder
from minillm.sampler import SamplingRow, sample
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.record import StepRecord
from minillm.sequence_row import SequenceRow

logger = logging.getLogger(__name__)

T = TypeVar("T")
Taken = list[tuple[Row, SequenceRow]]


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
        self.rows = DeviceRows(max_num_seqs, max_blocks, self.device)
        self.sampler = DeviceSampler(max_num_seqs, self.device)
        self.reads_late = False  # whether a step is launched before the last was collected
        self.graphs: DecodeGraphs | None = None
        self.reset()

    def use_graphs(self, capture: Capture) -> None:
        """From now on, decode steps are recorded and replayed; before the first plan only. Tiles
        of rows are cut by the host, so that a deterministic model has no graphs."""
        if isinstance(self.model, Decoder):
            self.graphs = DecodeGraphs(self.model, self.kv, self.rows, self.sampler, capture)

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan, and wait for it."""
        return self.launch(plan).collect()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flight:
        """Start to carry out one plan. At most one other may not have been collected."""
        with torch.accelerator.device_index(self.device.index):  # where kernels are launched
            self._update_rows(plan)
            self._move_blocks(plan)
            flight = Flight(StepResult(why_eager=self._why_eager(plan.rows)))
            if (
                self.graphs is None
                or flight.result.why_eager
                or not self._replay(plan.rows, flight)
            ):
                self._run(plan.rows, flight)
            return flight

    def needs_tokens(self, plan: StepPlan) -> bool:
        """Whether the flights before must be collected first: a token that is not read yet counts
        for the next one."""
        known = (self._rows.get(row.seq_id) for row in plan.rows)
        return any(state and state.num_unread and state.needs_host() for state in known)

    def _run(self, rows: Sequence[Row], flight: Flight) -> None:
        """Operation by operation."""
        result = flight.result
        for part, hidden in self._attempt(rows, self._forward, result):
            self._prompt_logprobs(part, hidden, result)
            sampling = [row for row in part if row.num_samples and row.seq_id not in result.errors]
            if sampling:
                self._sample(sampling, part, hidden, flight)

    def reset(self) -> None:
        """Forget all sequences."""
        self._rows: dict[int, SequenceRow] = {}
        self._free_rows = list(range(self.rows.num_rows - 1, -1, -1))

    # ---- what changed --------------------------------------------------------------------

    def _update_rows(self, plan: StepPlan) -> None:
        for seq_id in plan.dropped:
            self._free_rows.append(self._rows.pop(seq_id).row)
        if self.graphs is not None and plan.dropped:
            self._close_gaps()
        for new in plan.new:
            state = self._rows[new.seq_id] = SequenceRow.of(self._free_rows.pop(), new)
            if self.graphs is not None:
                self.sampler.set_row(state.row, state.sampling_row(new.sample_index))
        self.rows.tables.write(
            [
                (self._rows[row.seq_id].row, row.num_kept, row.blocks)
                for row in plan.rows
                if row.blocks
            ]
        )

    def _close_gaps(self) -> None:
        """Rows of a graph lie side by side, so the last ones move to where others have gone."""
        total = self.rows.num_rows
        gaps = sorted(row for row in self._free_rows if row < len(self._rows))
        behind = (state for state in self._rows.values() if state.row >= len(self._rows))
        for state, gap in zip(behind, gaps, strict=True):
            self.rows.move(state.row, gap)
            self.sampler.move(state.row, gap)
            state.row = gap
        self._free_rows = list(range(total - 1, len(self._rows) - 1, -1))

    def _move_blocks(self, plan: StepPlan) -> None:
        """In the order that the plan's docstring asks for."""
        if plan.swap_out and self.host is not None:
            self.kv.copy_blocks(plan.swap_out, self.host)
        if plan.copies:
            self.kv.copy_blocks(plan.copies, self.kv)
        if plan.swap_in and self.host is not None:
            self.host.copy_blocks(plan.swap_in, self.kv)

    # ---- a graph -------------------------------------------------------------------------

    def _why_eager(self, rows: Sequence[Row]) -> str:
        """Why no graph can carry these rows out; "" if one can, or if there are none."""
        if self.graphs is None:
            return ""
        if any(row.num_tokens > 1 for row in rows):
            return "several tokens of a sequence"
        if any(row.num_samples != 1 for row in rows):
            return "a sequence with no sample or several"
        reasons = (self._rows[row.seq_id].needs_host() for row in rows)
        return self.graphs.failed or next(filter(None, reasons), "")

    def _replay(self, rows: Sequence[Row], flight: Flight) -> bool:
        """Whether a graph was launched for these rows."""
        graphs, taken = self.graphs, self._taken(rows)
        if graphs is None:
            return False
        old = [(state.row, state.token_ids[row.start]) for row, state in taken if not state.is_fed]
        if old:
            place, token = upload(self.device, *np.array(old, dtype=np.int64).T)
            self.rows.last.index_copy_(0, place, token)
        requests = (state.sampling_row(state.new.sample_index) for _, state in taken)
        truncates = any(map(truncated, requests))
        places, starts = [state.row for _, state in taken], [row.start for row in rows]
        try:
            flight.result.graph_rows = graphs.launch(places, starts, truncates)
        except Exception as error:
            graphs.failed = flight.result.why_eager = f"no graph: {in_one_line(error)}"
            logger.warning("Decode steps run without CUDA graphs: %s", in_one_line(error))
            return False
        if len(rows) < len(self._rows):  # a padded row has written its token, too
            for state in self._rows.values():
                state.is_fed = state.is_fed and state.row >= flight.result.graph_rows
        read = read_later(self.rows.results)
        self._read_later(taken, places, read, flight)
        return True

    def _taken(self, rows: Sequence[Row]) -> Taken:
        return [(row, self._rows[row.seq_id]) for row in rows]

    def _read_later(
        self, taken: Taken, places: Sequence[int], read: Callable[[], np.ndarray], flight: Flight
    ) -> None:
        """The tokens of `taken` will be at `places` of what `read` gives, one after another for a
        row with several samples; the first of each lies on the device already."""
        for _, state in taken:
            state.is_fed = True
            state.num_unread += 1

        def finish() -> None:
            tokens, best = read()
            chosen = tokens[places].tolist()
            wrong = [failure_of(value) for value in best.view(np.float64)[places].tolist()]
            self._give(taken, chosen, wrong, flight.result)

        flight.reads.append(finish)

    def _give(
        self, taken: Taken, tokens: list[int], wrong: list[str | None], result: StepResult
    ) -> None:
        """Tokens that are here, and what is wrong with some of them."""
        end = 0
        for row, state in taken:
            start, end = end, end + row.num_samples
            given: list[int | None] = [*tokens[start:end]]
            if any(wrong[start:end]):
                errors = {i: why for i, why in enumerate(wrong[start:end]) if why is not None}
                given = [None if i in errors else token for i, token in enumerate(given)]
                result.fail_samples(row, errors)
            result.token_ids[row.seq_id] = given
            state.num_unread = max(state.num_unread - 1, 0)
            if given[0] is not None:
                state.token_ids.append(given[0])
                state.output_ids.append(given[0])

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
        taken = self._taken(rows)
        input_ids: list[int] = []
        unread: list[tuple[int, int]] = []  # where a token goes that only the device knows
        for row, state in taken:
            end = row.start + row.num_tokens
            input_ids += state.token_ids[row.start : end]
            if end > len(state.token_ids):
                unread.append((len(input_ids), state.row))
                input_ids.append(0)
        batch = make_batch(
            self.rows.tables,
            self.kv.block_size,
            [state.row for _, state in taken],
            [row.start for row in rows],
            [row.num_tokens for row in rows],
            input_ids,
        )
        if unread:
            where, source = upload(self.device, *np.array(unread, dtype=np.int64).T)
            batch.input_ids.index_copy_(0, where, self.rows.last.index_select(0, source))
        return batch

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return upload(self.device, np.array(values, dtype=np.int64))[0]

    # ---- tokens --------------------------------------------------------------------------

    def _sample(
        self, sampling: Sequence[Row], rows: Sequence[Row], hidden: Tensor, flight: Flight
    ) -> None:
        """Choose the next tokens of the rows that have reached their end, all at once."""

        def run(part: Sequence[Row]) -> None:
            wanted = hidden
            # Nothing is picked where all of it is wanted: the rows of a step that only decodes.
            if len(part) < len(hidden) or any(row.num_samples > 1 for row in part):
                ends = dict(zip((row.seq_id for row in rows), last_tokens(rows), strict=True))
                places = [ends[row.seq_id] for row in part for _ in range(row.num_samples)]
                wanted = hidden[self._tensor(places)]
            self._take(part, self.model.logits(wanted), flight)  # logits [K, V]

        self._attempt(sampling, run, flight.result)

    def _take(self, rows: Sequence[Row], logits: Tensor, flight: Flight) -> None:
        """Sample, and append what was sampled to the sequence; forks get theirs when they come."""
        taken = self._taken(rows)
        requests = [
            state.sampling_row(state.new.sample_index + each)
            for row, state in taken
            for each in range(row.num_samples)
        ]
        if ops.uses_kernels(logits) and not any(state.needs_host() for _, state in taken):
            self._take_on_device(taken, logits, requests, flight)
            return
        sampled, result = sample(logits, requests, self.row_by_row), flight.result
        wrong = [sampled.failed.get(place) for place in range(len(requests))]
        finish = partial(self._give, taken, sampled.token_ids, wrong, result)
        end = 0
        for row in rows:
            start, end = end, end + row.num_samples
            result.logprobs[row.seq_id] = sampled.logprobs[start:end]
        if not self.reads_late:
            for _, state in taken:
                state.is_fed = False
            finish()
            return
        firsts = [end - row.num_samples for row, end in zip(rows, ends_of(rows), strict=True)]
        self._feed(taken, self._tensor([max(sampled.token_ids[first], 0) for first in firsts]))
        for _, state in taken:
            state.num_unread += 1
        flight.reads.append(finish)

    def _take_on_device(
        self, taken: Taken, logits: Tensor, requests: Sequence[SamplingRow], flight: Flight
    ) -> None:
        """The same without waiting for a token."""
        tokens = self.sampler.choose(logits, requests)
        best = logits.amax(dim=-1).double().view(torch.int64)
        ends = ends_of([row for row, _ in taken])
        firsts = [end - row.num_samples for (row, _), end in zip(taken, ends, strict=True)]
        self._feed(taken, tokens[self._tensor(firsts)])
        read = read_later(torch.stack((tokens, best)))
        self._read_later(taken, range(len(requests)), read, flight)

    def _feed(self, taken: Taken, tokens: Tensor) -> None:
        """The next step finds the tokens on the device."""
        self.rows.last.index_copy_(0, self._tensor([state.row for _, state in taken]), tokens)
        for _, state in taken:
            state.is_fed = True

    def _prompt_logprobs(self, rows: Sequence[Row], hidden: Tensor, result: StepResult) -> None:
        """Log-probabilities of the prompt tokens that these rows predict, where they are wanted."""
        end = 0
        for row in rows:
            start, end = end, end + row.num_tokens
            new = self._rows[row.seq_id].new
            wanted = new.request.params.prompt_logprobs
            if wanted is None or new.sample_index:
                continue
            ids = new.request.prompt_token_ids
            targets = ids[row.start + 1 : row.start + 1 + row.num_tokens]
            if not targets:
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


def ends_of(rows: Sequence[Row]) -> list[int]:
    """Where the samples of each row end."""
    return list(accumulate(row.num_samples for row in rows))


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


@dataclass(slots=True)
class Step:
    """One step of an engine, from its plan to its commit; no flight before it is launched."""

    plan: StepPlan
    record: StepRecord
    flight: Flight | None = None

    def launch(self, runner: Runner) -> None:
        """Twice is fine."""
        if self.flight is None:
            self.flight = runner.launch(self.plan)
