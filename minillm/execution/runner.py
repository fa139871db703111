"""The model runner: executes a step plan (inputs, forward pass, logits, sampling).

The batch is persistent: each running sequence keeps its row between steps, with its last token and
its block table on the device. A plan lists only what changed since the last one.

    launch    update rows and blocks -> forward pass (eager, or one CUDA graph) -> hidden states
              -> logits of the requested positions -> sampling -> tokens on the device
    collect   tokens and log-probabilities on the host

The next step may be launched before this one is collected: the last token of each row
(`DeviceRows.last`) and the state of its logits processors (`sampling/edits.py`) stay on the device.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from minillm.execution.collect import failure, give_tokens, store_prompt_logprobs
from minillm.execution.executor import Capacity
from minillm.execution.flight import Flight, StepResult
from minillm.execution.graphs import Capture, DecodeGraphs, record_draft
from minillm.execution.state import DeviceRows, RowStates, SequenceRow
from minillm.layers.kv_cache import KVCache
from minillm.models.batches import make_batch
from minillm.models.decoder import Decoder
from minillm.models.deterministic import TiledDecoder
from minillm.models.trees import tree_batch
from minillm.ops.batch import Batch
from minillm.ops.transfers import indices, read_later, upload
from minillm.sampling.logprobs import LogprobTable, describe, token_logprobs
from minillm.sampling.sampler import Sampler
from minillm.scheduling.plan import Row, StepPlan
from minillm.speculative.speculator import Speculator
from minillm.speculative.trees import keep_path

T = TypeVar("T")
Group = tuple[Sequence[Row], Tensor]  # rows, and the hidden states [N, d] of their tokens


class Runner:
    """The executor of one process: owns the model, the KV cache and the host swap space.

    When a forward pass or sampling raises, the rows of the step run again one at a time. Only the
    rows that raise again fail (`StepResult.errors`).
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
        self.by_slot: Sequence[Tensor] = kv.tensors  # what is stored of each position
        # Deterministic mode: log-probabilities do not depend on the batch size.
        self.row_by_row = isinstance(model, TiledDecoder)
        self.device = model.device
        self.rows = DeviceRows(max_num_seqs, max_blocks, self.device)
        self.sampler = Sampler(max_num_seqs, model.config.vocab_size, self.device)
        self.graphs: DecodeGraphs | None = None
        self.verify_graphs: DecodeGraphs | None = None  # for steps that verify drafts
        self.speculator: Speculator | None = None
        self.isolates = True  # False with several ranks: errors are raised, not retried
        self.reset()

    @torch.inference_mode()
    def use_graphs(self, capture: Capture, *limits: float, num_drafts: int = 0) -> None:
        """Capture CUDA graphs of decode steps, and of steps that verify up to `num_drafts` drafts
        per row, within the `limits` of `record_all`. Later steps replay them."""
        if isinstance(self.model, Decoder):
            parts = self.model, self.kv, self.rows, capture
            if num_drafts:  # the larger graphs first: the smaller ones reuse their memory
                self.verify_graphs = DecodeGraphs(*parts, 1 + num_drafts)
                self.verify_graphs.record_all(*limits)
            self.graphs = DecodeGraphs(*parts)
            self.graphs.record_all(*limits)
            record_draft(self.speculator, self.rows, capture, *limits)

    # ---- the executor --------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """Number of KV blocks on the device and the host, and of rows."""
        return Capacity(
            self.kv.num_blocks,
            self.kv.block_size,
            self.host.num_blocks if self.host else 0,
            self.rows.num_rows,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one plan and wait for its result."""
        return self.launch(plan).collect()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flight:
        """Start a step without waiting for it. At most one earlier step may be uncollected."""
        with torch.accelerator.device_index(self.device.index):
            self._update_rows(plan)
            self._move_blocks(plan)
            flight = Flight()
            planned = plan.rows
            if self.speculator is not None:
                planned = self.speculator.draft(plan, self._rows)
            for rows, hidden in self._passes(planned, flight.result):
                self._prompt_logprobs(rows, hidden, flight)
                wanted = [
                    row for row in rows if row.num_logits and row.seq_id not in flight.result.errors
                ]
                run = partial(self._sample, rows, hidden, flight)
                self._retry_rows(wanted, run, flight.result)
            return flight

    def reset(self) -> None:
        """Remove all sequences."""
        if self.speculator is not None:
            self.speculator.forget(self._rows)
        self._rows: dict[int, SequenceRow] = {}
        self._free_rows = list(range(self.rows.num_rows - 1, -1, -1))

    def stats(self) -> dict[str, int]:
        """Allocated bytes by part of the memory plan, and for CUDA graphs. On a GPU "activations"
        is the allocator's peak minus weights and caches; there is no such entry on a CPU."""
        sizes = {
            "weights": sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers())),
            "kv_cache": self.kv.num_bytes,
            "swap_space": self.host.num_bytes if self.host else 0,
        }
        if self.speculator is not None:
            sizes |= self.speculator.allocated()
        if self.device.type != "cpu":
            peak = torch.get_device_module(self.device).max_memory_allocated(self.device)
            kept = ("weights", "kv_cache", "draft_weights", "draft_kv_cache")
            sizes["activations"] = peak - sum(sizes.get(name, 0) for name in kept)
        if self.graphs is not None:
            sizes["cuda_graphs"] = self.graphs.num_bytes
        if self.verify_graphs is not None:
            sizes["cuda_graphs"] += self.verify_graphs.own_bytes
        return sizes

    def close(self) -> None:
        """Remove all sequences. Memory is freed with this object."""
        self.reset()

    # ---- persistent batch ----------------------------------------------------------------

    def _update_rows(self, plan: StepPlan) -> None:
        for seq_id in plan.dropped:
            state = self._rows.pop(seq_id)
            state.drafts = []  # `collect` of the last step must not append to a reused row
            self.sampler.edits.drop(state.row)
            self._free_rows.append(state.row)
        if self.graphs is not None and plan.dropped:
            self._close_gaps()
        for new in plan.new:
            row, known = self._free_rows.pop(), list(new.token_ids)
            self._rows[new.seq_id] = SequenceRow(row, new, known)
            self.sampler.set_row(row, new, known)
        self.rows.tables.write(
            [
                (self._rows[row.seq_id].row, row.num_kept, row.blocks)
                for row in plan.rows
                if row.blocks
            ]
        )

    def _close_gaps(self) -> None:
        """Move the last rows into freed ones: a CUDA graph always computes rows 0 to n - 1."""
        total = self.rows.num_rows
        gaps = sorted(row for row in self._free_rows if row < len(self._rows))
        behind = (state for state in self._rows.values() if state.row >= len(self._rows))
        for state, gap in zip(behind, gaps, strict=True):
            self.rows.move(state.row, gap)
            self.sampler.move(state.row, gap)
            state.row = gap
        self._free_rows = list(range(total - 1, len(self._rows) - 1, -1))

    def _move_blocks(self, plan: StepPlan) -> None:
        """Swap out, copy, then swap in: the order that `StepPlan` requires."""
        if plan.swap_out and self.host is not None:
            self.kv.copy_blocks(plan.swap_out, self.host)
        if plan.copies:
            self.kv.copy_blocks(plan.copies, self.kv)
        if plan.swap_in and self.host is not None:
            self.host.copy_blocks(plan.swap_in, self.kv)

    # ---- forward -------------------------------------------------------------------------

    def _passes(self, rows: Sequence[Row], result: StepResult) -> list[Group]:
        """Run the model."""
        if self.graphs is not None and (replayed := self._replay(rows, result)):
            return [replayed]
        return self._retry_rows(rows, self._forward, result)

    def _replay(self, rows: Sequence[Row], result: StepResult) -> Group | None:
        """The rows in the order of the device, so that a CUDA graph's hidden states need not be
        gathered; None if no graph fits them."""
        if not rows:
            return None
        most = max(row.num_tokens for row in rows)
        graphs = self.graphs if most == 1 else self.verify_graphs
        states = self._states(rows)
        if graphs is None or most > graphs.query_len or any(state.tree for _, state in states):
            result.why_eager = "several tokens of a sequence"
            return None
        states.sort(key=lambda pair: pair[1].row)
        hidden = graphs.replay(states, *self._input_ids(states))
        if hidden is None:
            result.why_eager = graphs.missing
            return None
        result.graph_rows = graphs.num_rows
        return [row for row, _ in states], hidden

    def _retry_rows(
        self, rows: Sequence[Row], run: Callable[[Sequence[Row]], T], result: StepResult
    ) -> list[tuple[Sequence[Row], T]]:
        """Run all rows together; if that raises, run each row alone (their KV is written again)."""
        if not rows:
            return []
        try:
            return [(rows, run(rows))]
        except Exception as error:
            if not self.isolates:
                raise
            if len(rows) == 1:
                result.fail(rows[0], failure(error))
                self._rows[rows[0].seq_id].is_fed = True  # a step launched ahead has no other token
                return []
        return [done for row in rows for done in self._retry_rows([row], run, result)]

    def _forward(self, rows: Sequence[Row]) -> Tensor:
        """Hidden states [N, d] of the rows' tokens, concatenated in row order."""
        return self.model(self.batch(rows), self.kv)

    def batch(self, rows: Sequence[Row]) -> Batch:
        """The flat batch of these rows."""
        states = self._states(rows)
        input_ids, pending = self._input_ids(states)
        spans = [row.start for row in rows], [row.num_tokens for row in rows]
        places = [state.row for _, state in states]
        batch = make_batch(self.rows.tables, self.kv.block_size, places, *spans, input_ids)
        if any(trees := [state.tree for _, state in states]):
            batch = tree_batch(batch, *spans, trees)
        if pending:
            where, source = upload(self.device, *np.array(pending, dtype=np.int64).T)
            batch.input_ids.index_copy_(0, where, self.rows.last.index_select(0, source))
        return batch

    def _input_ids(self, states: RowStates) -> tuple[list[int], list[tuple[int, int]]]:
        """The input ids of a flat batch, and (index, row) of each token that is only on the device,
        for which the input id is 0."""
        input_ids: list[int] = []
        pending: list[tuple[int, int]] = []
        for row, state in states:
            end = row.start + row.num_tokens
            input_ids += state.token_ids[row.start : end]
            input_ids += state.drafts
            if end > len(state.token_ids) and not state.drafts:
                pending.append((len(input_ids), state.row))
                input_ids.append(0)
        return input_ids, pending

    def _states(self, rows: Sequence[Row]) -> RowStates:
        return [(row, self._rows[row.seq_id]) for row in rows]

    # ---- sampling ------------------------------------------------------------------------

    def _sample(
        self, rows: Sequence[Row], hidden: Tensor, flight: Flight, part: Sequence[Row]
    ) -> None:
        """Sample tokens for `part` of the `rows`. `hidden` has the hidden states of all `rows`."""
        states = self._states(part)
        logits = self.model.logits(self._wanted(rows, hidden, part))  # [R, V]
        row_ids: list[int] = []
        positions: list[int] = []
        forks: list[int] = []
        for row, state in states:
            end = row.start + row.num_tokens  # position of the last sampled token
            row_ids += [state.row] * row.num_logits
            positions += state.positions(end - row.num_logits + 1, end + 1)
            forks += [row.num_forks] * row.num_logits
        verified = [state for _, state in states if state.drafts] if self.speculator else []
        drafts = {state.row: state.drafts for state in verified}
        dists = {state.row: state.dist for state in verified}
        tokens, best = self.sampler.choose(logits, row_ids, positions, forks, drafts, dists)
        entries = self._logprobs(states, logits, tokens)
        self._feed(states, tokens)
        read = read_later(tokens, best)
        keep = partial(keep_path, self.by_slot, self.rows.tables)
        give = partial(give_tokens, states, read, entries, self.sampler, flight.result, keep)
        flight.reads.append(give)

    def _wanted(self, rows: Sequence[Row], hidden: Tensor, part: Sequence[Row]) -> Tensor:
        """Hidden states [R, d] of the positions whose logits are computed."""
        if len(part) == len(hidden):
            return hidden  # a pure decode step
        ends = accumulate(row.num_tokens for row in rows)  # of each row in the flat batch
        end_of = dict(zip((row.seq_id for row in rows), ends, strict=True))
        wanted = [range(end_of[row.seq_id] - row.num_logits, end_of[row.seq_id]) for row in part]
        places = [place for places in wanted for place in places]
        return hidden if len(places) == len(hidden) else hidden[indices(self.device, places)]

    def _logprobs(self, states: RowStates, logits: Tensor, tokens: Tensor) -> LogprobTable | None:
        """Log-probabilities of the sampled tokens, for the rows that request them."""
        requested: list[tuple[int, int, int]] = []  # (logits row, sample index, top k)
        first = sample = 0
        for row, state in states:
            top_k = state.new.params.logprobs
            if top_k is not None:
                of = [*range(row.num_logits), *[row.num_logits - 1] * row.num_forks]
                requested += [(first + at, sample + i, top_k) for i, at in enumerate(of)]
            first, sample = first + row.num_logits, sample + row.num_samples
        if not requested:
            return None
        which, samples, counts = zip(*requested, strict=True)
        raw, chosen = logits[indices(self.device, which)], tokens[indices(self.device, samples)]
        return describe(self.sampler.whole(raw), chosen, counts, self.row_by_row)

    def _feed(self, states: RowStates, tokens: Tensor) -> None:
        """Write each row's last token to `DeviceRows.last` for the next step. Rows that verify
        drafts are skipped: the host decides their last token."""
        ends = accumulate(row.num_samples for row, _ in states)
        last = [end - row.num_forks - 1 for (row, _), end in zip(states, ends, strict=True)]
        if self.speculator is not None:
            last = [end for (_, state), end in zip(states, last, strict=True) if not state.drafts]
            states = [(row, state) for row, state in states if not state.drafts]
        if not states:
            return
        if len(last) < len(tokens):
            tokens = tokens[indices(self.device, last)]
        row_ids = [state.row for _, state in states]
        if row_ids == list(range(len(row_ids))):
            self.rows.last[: len(row_ids)] = tokens
        else:
            self.rows.last.index_copy_(0, indices(self.device, row_ids), tokens)
        self.sampler.append(row_ids, [row.start + row.num_tokens for row, _ in states], tokens)
        for _, state in states:
            state.is_fed = True

    def _prompt_logprobs(self, rows: Sequence[Row], hidden: Tensor, flight: Flight) -> None:
        """Compute the prompt log-probabilities that these rows request, to be read later."""
        end = 0
        for row in rows:
            start, end = end, end + row.num_tokens
            new = self._rows[row.seq_id].new
            wanted = new.params.prompt_logprobs
            if wanted is None or new.sample_index:
                continue
            known = min(row.start + 1 + row.num_tokens, new.num_prompt_tokens)
            targets = new.token_ids[row.start + 1 : known]
            if not targets:
                continue
            try:
                entries = token_logprobs(
                    lambda some: self.sampler.whole(self.model.logits(some)),
                    hidden[start : start + len(targets)],
                    indices(self.device, targets),
                    wanted,
                    row_by_row=self.row_by_row,
                )
            except Exception as error:
                flight.result.fail(row, failure(error))
            else:
                flight.reads.append(partial(store_prompt_logprobs, row, entries, flight.result))
