"""The runner: a plan becomes tensors, the model runs once, logits become tokens.

It keeps one row per running sequence between steps: the tokens, and the block table in a tensor on
the device. A plan says only what changed, so a step costs O(rows) list work and no rebuilding.

    launch    rows and blocks -> forward (operations, or one graph) -> hidden states
              -> logits where they are wanted -> sample -> tokens on the device
    collect   tokens and log-probabilities on the host

Between the two the next step may be launched: the last token of each row stays on the device
(`DeviceRows.last`), and so does what edits its logits (`sampling/edits.py`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.execution.collect import Taken, described, give_prompt, give_tokens
from minillm.execution.executor import Capacity, Executor
from minillm.execution.flight import Flight, StepResult
from minillm.execution.graphs import Capture, DecodeGraphs
from minillm.execution.state import DeviceRows, SequenceRow
from minillm.layers.kv_cache import KVCache
from minillm.models.batches import make_batch
from minillm.models.decoder import Decoder
from minillm.models.deterministic import TiledDecoder
from minillm.ops.batch import Batch
from minillm.ops.transfers import read_later, upload
from minillm.sampling.logprobs import Described, describe, token_logprobs
from minillm.sampling.sampler import Sampler
from minillm.scheduling.plan import Row, StepPlan
from minillm.speculative.speculator import Speculator

T = TypeVar("T")


class Runner:
    """The executor of one process: owns the model, the cache on its device and the host's part.

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
        # Deterministic mode: log-probabilities row by row, so that no batch changes their rounding.
        self.row_by_row = isinstance(model, TiledDecoder)
        self.device = model.device
        self.rows = DeviceRows(max_num_seqs, max_blocks, self.device)
        self.sampler = Sampler(max_num_seqs, model.config.vocab_size, self.device)
        self.graphs: DecodeGraphs | None = None
        self.verify_graphs: DecodeGraphs | None = None  # of steps with drafts
        self.speculator: Speculator | None = None
        self.isolates = True  # False: an error in a pass is raised, as other ranks wait in it
        self.reset()

    @torch.inference_mode()
    def use_graphs(
        self, capture: Capture, max_bytes: int | None = None, num_drafts: int = 0
    ) -> None:
        """Record decode steps now, also those that verify up to `num_drafts` drafts per row, in at
        most so much memory, and replay them from now on."""
        if isinstance(self.model, Decoder):
            parts = self.model, self.kv, self.rows, capture
            if num_drafts:  # the largest first: all share its memory
                self.verify_graphs = DecodeGraphs(*parts, 1 + num_drafts)
                self.verify_graphs.record_all(max_bytes)
            self.graphs = DecodeGraphs(*parts)
            self.graphs.record_all(max_bytes)

    # ---- the executor --------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """Blocks of both caches, and rows."""
        return Capacity(
            self.kv.num_blocks,
            self.kv.block_size,
            self.host.num_blocks if self.host else 0,
            self.rows.num_rows,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan, and wait for it."""
        return self.launch(plan).collect()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flight:
        """Start to carry out one plan. At most one other may not have been collected."""
        with torch.accelerator.device_index(self.device.index):  # where kernels are launched
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
                self._attempt(wanted, run, flight.result)
            return flight

    def reset(self) -> None:
        """Forget all sequences."""
        if self.speculator is not None:
            self.speculator.forget(self._rows)
        self._rows: dict[int, SequenceRow] = {}
        self._free_rows = list(range(self.rows.num_rows - 1, -1, -1))

    def stats(self) -> dict[str, int]:
        """Bytes that are really allocated, under the names of the memory plan's parts, and for
        graphs. "activations" is the peak of a GPU's allocator beyond the rest; a CPU's does not
        tell."""
        sizes = {
            "weights": sum(
                each.nbytes for each in (*self.model.parameters(), *self.model.buffers())
            ),
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
        """Nothing but memory, which goes with this object."""
        self.reset()

    # ---- what changed --------------------------------------------------------------------

    def _update_rows(self, plan: StepPlan) -> None:
        for seq_id in plan.dropped:
            state = self._rows.pop(seq_id)
            state.drafts = []  # nothing is verified in a row that may be another's by then
            self.sampler.edits.drop(state.row)
            self._free_rows.append(state.row)
        if self.graphs is not None and plan.dropped:
            self._close_gaps()
        for new in plan.new:
            state = self._rows[new.seq_id] = SequenceRow.of(self._free_rows.pop(), new)
            self.sampler.set_row(state.row, state.sampling_row())
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

    # ---- forward -------------------------------------------------------------------------

    def _passes(
        self, rows: Sequence[Row], result: StepResult
    ) -> list[tuple[Sequence[Row], Tensor]]:
        """Run the model: rows, and the hidden states [N, d] of their tokens."""
        if self.graphs is not None:
            hidden = self._replay(rows, result)
            if hidden is not None:
                return [(rows, hidden)]
        return self._attempt(rows, self._forward, result)

    def _replay(self, rows: Sequence[Row], result: StepResult) -> Tensor | None:
        """Hidden states [N, d] from a graph; None where there is none for these rows."""
        if not rows:
            return None
        most = max(row.num_tokens for row in rows)
        graphs = self.graphs if most == 1 else self.verify_graphs
        if graphs is None or most > graphs.query_len:
            result.why_eager = "several tokens of a sequence"
            return None
        taken = self._taken(rows)
        ids, unread = self._known(taken)
        if most == 1:
            self._feed_old(taken)
        places, starts = [state.row for _, state in taken], [row.start for row in rows]
        counts, on_device = [row.num_tokens for row in rows], [source for _, source in unread]
        found = graphs.launch(places, starts, counts, ids, on_device)
        if found is None:
            result.why_eager = graphs.missing
            return None
        result.graph_rows = graphs.num_rows
        return graphs.hidden[self._tensor(found)]

    def _feed_old(self, taken: Taken) -> None:
        """Put the tokens on the device that a graph reads there and that came from the host."""
        old = [(state.row, state.token_ids[row.start]) for row, state in taken if not state.is_fed]
        if old:
            place, token = upload(self.device, *np.array(old, dtype=np.int64).T)
            self.rows.last.index_copy_(0, place, token)
            for _, state in taken:
                state.is_fed = True

    def _attempt(
        self, rows: Sequence[Row], run: Callable[[Sequence[Row]], T], result: StepResult
    ) -> list[tuple[Sequence[Row], T]]:
        """All rows together; where that fails, each alone. Writing a position twice is harmless."""
        if not rows:
            return []
        try:
            return [(rows, run(rows))]
        except Exception as error:
            if not self.isolates:
                raise
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
        input_ids, unread = self._known(taken)
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

    def _known(self, taken: Taken) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a flat batch; and where one goes that only the device knows, with its
        row."""
        input_ids: list[int] = []
        unread: list[tuple[int, int]] = []
        for row, state in taken:
            end = row.start + row.num_tokens
            input_ids += state.token_ids[row.start : end]
            input_ids += state.drafts
            if end > len(state.token_ids) and not state.drafts:
                unread.append((len(input_ids), state.row))
                input_ids.append(0)
        return input_ids, unread

    def _taken(self, rows: Sequence[Row]) -> Taken:
        return [(row, self._rows[row.seq_id]) for row in rows]

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return upload(self.device, np.array(values, dtype=np.int64))[0]

    # ---- sample --------------------------------------------------------------------------

    def _sample(
        self, rows: Sequence[Row], hidden: Tensor, flight: Flight, part: Sequence[Row]
    ) -> None:
        """Choose tokens for `part` of the rows whose hidden states these are."""
        taken = self._taken(part)
        logits = self.model.logits(self._wanted(rows, hidden, part))  # [R, V]
        places: list[int] = []
        positions: list[int] = []
        forks: list[int] = []
        for row, state in taken:
            end = row.start + row.num_tokens  # the position of the last token that is chosen
            places += [state.row] * row.num_logits
            positions += range(end - row.num_logits + 1, end + 1)
            forks += [row.num_forks] * row.num_logits
        verified = [state for _, state in taken if state.drafts] if self.speculator else []
        drafts = {state.row: state.drafts for state in verified}
        laws = {state.row: state.law for state in verified}
        tokens, best = self.sampler.choose(logits, places, positions, forks, drafts, laws)
        entries = self._logprobs(taken, logits, tokens)
        self._feed(taken, tokens)
        read = read_later(tokens, best)
        give = partial(give_tokens, taken, read, entries, self.sampler, flight.result)
        flight.reads.append(give)

    def _wanted(self, rows: Sequence[Row], hidden: Tensor, part: Sequence[Row]) -> Tensor:
        """Hidden states [R, d] of the positions whose logits are wanted."""
        if len(part) == len(hidden):
            return hidden  # the rows of a step that only decodes
        ends = dict(zip((row.seq_id for row in rows), ends_of(rows), strict=True))
        wanted = [range(ends[row.seq_id] - row.num_logits, ends[row.seq_id]) for row in part]
        return hidden[self._tensor([place for places in wanted for place in places])]

    def _logprobs(self, taken: Taken, logits: Tensor, tokens: Tensor) -> Described | None:
        """Log-probabilities of the chosen tokens, for the rows that ask."""
        asked: list[tuple[int, int, int]] = []  # of a sample: its logits, its place, its top k
        first = sample = 0
        for row, state in taken:
            top_k = state.new.params.logprobs
            if top_k is not None:
                of = [*range(row.num_logits), *[row.num_logits - 1] * row.num_forks]
                asked += [(first + each, sample + i, top_k) for i, each in enumerate(of)]
            first, sample = first + row.num_logits, sample + row.num_samples
        if not asked:
            return None
        which, places, counts = zip(*asked, strict=True)
        raw, chosen = logits[self._tensor(which)], tokens[self._tensor(places)]
        return describe(self.sampler.whole(raw), chosen, counts, self.row_by_row)

    def _feed(self, taken: Taken, tokens: Tensor) -> None:
        """The next step finds the token that continues each sequence on the device; where drafts
        are verified, it comes from the host."""
        ends = accumulate(row.num_samples for row, _ in taken)
        own = [end - row.num_forks - 1 for (row, _), end in zip(taken, ends, strict=True)]
        if self.speculator is not None:
            own = [each for (_, state), each in zip(taken, own, strict=True) if not state.drafts]
            taken = [(row, state) for row, state in taken if not state.drafts]
        if not taken:
            return
        if len(own) < len(tokens):
            tokens = tokens[self._tensor(own)]
        places = [state.row for _, state in taken]
        self.rows.last.index_copy_(0, self._tensor(places), tokens)
        self.sampler.append(places, [row.start + row.num_tokens for row, _ in taken], tokens)
        for _, state in taken:
            state.is_fed = True

    def _prompt_logprobs(self, rows: Sequence[Row], hidden: Tensor, flight: Flight) -> None:
        """Log-probabilities of the prompt tokens that these rows predict, where they are wanted."""
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
                    self._tensor(targets),
                    wanted,
                    row_by_row=self.row_by_row,
                )
            except Exception as error:
                flight.result.fail(row, described(error))
            else:
                flight.reads.append(partial(give_prompt, row, entries, flight.result))


def ends_of(rows: Sequence[Row]) -> list[int]:
    """Where in the flat batch each row ends."""
    return list(accumulate(row.num_tokens for row in rows))


def runner_of(executor: Executor) -> Runner:
    """The runner of an engine in this process, for measurements; ConfigError if it has none."""
    if not isinstance(executor, Runner):
        raise ConfigError(f"This engine computes in a {type(executor).__name__}, not in a Runner.")
    return executor
