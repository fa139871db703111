"""Deliberate bugs of the engine, each with a cell of the matrix that finds it.

Many are bugs that other engines shipped (numbers are issues of their repositories).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from minillm import ops
from minillm.cache.manager import BlockManager
from minillm.engine.loop import Engine
from minillm.execution import collect, runner
from minillm.execution.runner import Runner
from minillm.execution.state import SequenceRow
from minillm.models import deterministic, fixed_sums
from minillm.models.fixed_sums import FixedSumMethod
from minillm.ops import cpu, cpu_sums
from minillm.ops.cpu_layers import Layers
from minillm.parallel import communicator, executor, experts, shard
from minillm.parallel.executor import Ranks
from minillm.parallel.experts import OwnExperts
from minillm.parallel.split import Split, Stage
from minillm.parallel.stages import ToNextStage
from minillm.sampling.edits import Edits
from minillm.sampling.sampler import Sampler
from minillm.scheduling import drafts
from minillm.scheduling.drafts import Drafts
from minillm.speculative.speculator import Speculator
from minillm_kernels import batch_invariant, reference
from tests.matrix.cells import Cell, check, reference_of

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


def swap(owner: Any, name: str, wrong: Any) -> Plant:
    """Something else in the place of an attribute."""
    return lambda patch: patch.setattr(owner, name, wrong)


# ---- blocks and rows -----------------------------------------------------------------------------


def without_moves(what: str) -> Plant:
    """The runner leaves one kind of block moves out."""
    move = Runner._move_blocks
    wrong = lambda self, plan: move(self, replace(plan, **{what: []}))  # noqa: E731
    return swap(Runner, "_move_blocks", wrong)


def positions_of_a_chunk_begin_at_zero(patch: Patch) -> None:
    build = Runner.batch

    def broken(self, rows):
        batch = build(self, rows)
        positions = batch.positions.clone()
        bounds = batch.query_start.tolist()
        for row, start, end in zip(rows, bounds[:-1], bounds[1:], strict=True):
            if row.num_tokens > 1:
                positions[start:end] -= row.start
        return replace(batch, positions=positions)

    patch.setattr(Runner, "batch", broken)


def tables_keep_the_source_of_a_copy(patch: Patch) -> None:
    update = Runner._update_rows

    def broken(self, plan):
        sources = {copy.target: copy.source for copy in plan.copies}
        rows = [
            row._replace(blocks=tuple(sources.get(block, block) for block in row.blocks))
            for row in plan.rows
        ]
        update(self, replace(plan, rows=rows))

    patch.setattr(Runner, "_update_rows", broken)


def prefix_hits_name_a_wrong_block(patch: Patch) -> None:
    """Another order would not show: keys know their positions. So the last is a neighbour."""
    match = BlockManager.match

    def broken(self, *arguments):
        found = match(self, *arguments)
        others = [block for block in range(self.pool.num_blocks) if block not in found.blocks]
        return found._replace(blocks=[*found.blocks[:-1], *others[: bool(found.blocks)]])

    patch.setattr(BlockManager, "match", broken)


def preempted_blocks_stay_in_the_runners_table(patch: Patch) -> None:
    """Only what is behind the old table is sent again, as if the sequence had kept its row."""
    update = Runner._update_rows

    def broken(self, plan):
        known = self.__dict__.setdefault("known", set())
        rows = [
            row._replace(num_kept=1, blocks=row.blocks[1:])
            if row.seq_id in known and row.num_kept == 0
            else row
            for row in plan.rows
        ]
        known.update(row.seq_id for row in plan.rows)
        update(self, replace(plan, rows=rows))

    patch.setattr(Runner, "_update_rows", broken)


def windows_are_forgotten(patch: Patch) -> None:
    """By the call of all layers."""
    init = Layers.__init__

    def broken(self, *arguments):
        init(self, *arguments)
        for layer in self._layers:
            layer.window = 0

    patch.setattr(Layers, "__init__", broken)


# ---- sampling ------------------------------------------------------------------------------------


def choosing(change: Callable[..., tuple]) -> Plant:
    """The sampler is asked for other logits, rows or positions."""
    choose = Sampler.choose

    def wrong(self, logits, rows, positions, *rest):
        return choose(self, *change(self, logits, list(rows), list(positions)), *rest)

    return swap(Sampler, "choose", wrong)


def several(rows: list[int]) -> bool:
    """Whether a row has several logits, as one with drafts."""
    return len(set(rows)) < len(rows)


def the_draw_moves_on_after_a_preemption(patch: Patch) -> None:
    set_row = Sampler.set_row

    def seen(self, row, new, known):
        came_back = len(new.token_ids) > new.num_prompt_tokens and not new.sample_index
        self.__dict__.setdefault("came_back", {})[row] = came_back
        set_row(self, row, new, known)

    def later(self, logits, rows, positions):
        at = [at + self.came_back[row] for at, row in zip(positions, rows, strict=True)]
        return logits, rows, at

    patch.setattr(Sampler, "set_row", seen)
    choosing(later)(patch)


def forks_draw_the_same(patch: Patch) -> None:
    pack = Sampler._pack

    def broken(self, *arguments):
        right = pack(self, *arguments)
        return right._replace(sample_index=torch.zeros_like(right.sample_index))

    patch.setattr(Sampler, "_pack", broken)


def edits_ignore_earlier_drafts(patch: Patch) -> None:
    choose = Sampler.choose

    def wrong(*arguments):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Edits, "append", lambda *_: None)
            return choose(*arguments)

    patch.setattr(Sampler, "choose", wrong)


def appended(change: Callable[[int, list[int]], tuple[int, list[int]]]) -> Plant:
    """Other tokens are counted than those that were accepted."""
    append = Sampler.append_run
    return swap(
        Sampler,
        "append_run",
        lambda self, row, position, tokens: append(self, row, *change(position, tokens)),
    )


def log_probabilities_of_another_row(patch: Patch) -> None:
    describe = runner.describe
    patch.setattr(runner, "describe", lambda raw, *rest: describe(raw.roll(1, 0), *rest))


# ---- drafts --------------------------------------------------------------------------------------

match = collect.match


def a_text_goes_on_behind_its_stop(patch: Patch) -> None:
    """The end of a run belongs to no text, but is delivered."""
    deliver = Engine._deliver

    def all_of_it(self: Engine, row: Any, sequence: Any, live: Any, result: Any, now: Any) -> None:
        deliver(self, row, sequence, live, result, now)
        tokens = result.token_ids.get(row.seq_id, [])
        completion = live.completions[sequence.index]
        cut = completion.finish_reason == "stop" and not row.num_forks
        if cut and completion.token_ids[-1:] != tokens[-1:]:
            completion.token_ids.extend(tokens[-1:])

    patch.setattr(Engine, "_deliver", all_of_it)


def drafts_of_the_next_row(patch: Patch) -> None:
    """The tokens are fed to another row than the one whose samples they are compared with."""
    batch = Runner.batch

    def turned(self: Runner, rows: Any) -> Any:
        states = [self._rows[row.seq_id] for row in rows if row.num_logits > 1]
        own = [state.drafts for state in states]
        for state, other in zip(states, own[1:] + own[:1], strict=True):
            state.drafts = [*other, *state.drafts][: len(state.drafts)]
        made = batch(self, rows)
        for state, right in zip(states, own, strict=True):
            state.drafts = right
        return made

    patch.setattr(Runner, "batch", turned)


def a_row_with_a_token_on_the_device_drafts(patch: Patch) -> None:
    """Its last token is not known when it is planned ahead."""
    can_draft = drafts.can_draft

    def unknowing(row: Any, sequence: Any) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(sequence, "num_pending", 0)
            return can_draft(row, sequence)

    patch.setattr(Drafts, "wants", lambda self, sequence, num_running: False)
    patch.setattr(drafts, "can_draft", unknowing)


def resumed_rows_keep_their_drafts(patch: Patch) -> None:
    """vLLM#28558: what was proposed before a preemption is verified after it."""
    kept, draft = {}, Speculator.draft

    def remember(self: Speculator, plan: Any, states: Any) -> Any:
        rows = draft(self, plan, states)
        drafted = {seq_id: state.drafts for seq_id, state in states.items() if state.drafts}
        kept.update(drafted)
        return rows

    def resumed(row: int, new: Any, token_ids: list[int]) -> SequenceRow:
        return SequenceRow(row, new, token_ids, drafts=kept.get(new.seq_id, []))

    patch.setattr(Speculator, "draft", remember)
    patch.setattr(runner, "SequenceRow", resumed)


# ---- ranks ---------------------------------------------------------------------------------------


def up_of_another_rank(name, whole, held, split, slice_of=shard.slice_of):
    """As where the stack of gate and up is cut, and not each of them: the shapes fit."""
    if name.endswith("up_proj"):
        split = Split((split.rank + 1) % split.size, split.size)
    return slice_of(name, whole, held, split)


def no_sum(self, matrix, x, bias):
    total = self.inner.apply(matrix, x, None)
    return total if bias is None else total + bias


def summed_twice(self, x):
    """The shared experts are whole sums already."""
    shared = self.moe.shared(x)
    return self.communicator.sum(self.moe(x).contiguous()) + self.communicator.sum(shared) / 2


def of_another_row(self, plan, result):
    """A stage is fed the tokens of its neighbours."""
    rows = [row.seq_id for row in plan.rows if row.num_logits]
    for row, other in zip(rows, [*rows[1:], *rows[:1]], strict=True):
        self._learned[row] = result.token_ids[other][:1]


def twice_rounded(self, x, residual):
    """As if half of the boundary's sum were lost."""
    total = x if residual is None else x.bfloat16().float() + residual
    self.pipe.send(total)
    return total, total


def every_copy_gets_the_plan_of_the_first(patch: Patch) -> None:
    bodies = executor.Ranks.bodies
    patch.setattr(executor.Ranks, "bodies", lambda *args: [bodies(*args)[0]] * 2)


def a_weight_is_another_tokens(patch: Patch) -> None:
    packed = experts.packed
    wrong = lambda x, weights, chosen: packed(x, weights.roll(1, 0), chosen)  # noqa: E731
    patch.setattr(experts, "packed", wrong)


# ---- bits ----------------------------------------------------------------------------------------


def unpadded(num_rows, tiles):
    for start in range(0, num_rows, 16):
        stop = min(start + 16, num_rows)
        yield start, stop, stop - start


def untiled_attention(q, *others):
    """torch's attention, which knows nothing of padding."""
    count = int(others[2][-1])
    out = reference.paged_attention(q[:count], *others)
    return torch.cat([out, out[-1:].expand(len(q) - count, -1, -1)])


def left_to_right(parts: Tensor) -> Tensor:
    total = parts[0].float()
    for each in parts[1:]:
        total = total + each
    return total


def ring(parts: Tensor) -> Tensor:
    """Each value's sum begins at another rank, as in a ring."""
    flat = parts.float().flatten(1)
    totals = torch.stack([left_to_right(flat.roll(-first, 0)) for first in range(len(flat))])
    chunk = torch.arange(flat.shape[1]) * len(flat) // flat.shape[1]
    return totals.gather(0, chunk[None])[0].view(parts.shape[1:])


def rounded_parts(self: FixedSumMethod, matrix, x: Tensor) -> Tensor:
    sums = cpu_sums.panel_sums(x, matrix.weight, self.out_features, self.parts)
    return sums.to(x.dtype).float()


def as_many_as_ranks(matrix) -> int:
    """One part on each rank; one rank is right, as it has all eight."""
    (part,) = matrix.parts
    return 8 if len(part.columns) == part.shape[1] else 1


def last_bias(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return total.to(dtype) if bias is None else total.to(dtype) + bias


DRAFTED, WRONG = Cell(chunk=7, drafts="right"), Cell(chunk=7, drafts="mostly right")
FORKS = Cell("llama", chunk=7)
TILES = Cell("qwen3_moe", "exact float32", chunk=7)
BITS, BITS_4 = (Cell("llama", "exact bfloat16", ranks="tp 2"),
                Cell("llama", "exact float32", ranks="tp 4"))  # fmt: skip
BUGS: Mapping[str, tuple[Plant, Cell]] = {
    "copies are not made": (without_moves("copies"), FORKS),
    "a partial hit is not copied": (
        without_moves("copies"), Cell("llama", chunk=32, cache="radix")),
    "nothing is swapped in": (without_moves("swap_in"), Cell("llama", chunk=32, pool="swap")),
    "nothing is swapped out": (
        without_moves("swap_out"), Cell("llama", chunk=7, cache="hash", pool="swap")),
    "positions of a chunk": (positions_of_a_chunk_begin_at_zero, Cell("llama", chunk=7)),
    "tables after a copy": (tables_keep_the_source_of_a_copy, Cell("llama", overlaps=True)),
    "wrong block, hash": (prefix_hits_name_a_wrong_block, Cell("llama", cache="hash")),
    "wrong block, radix": (prefix_hits_name_a_wrong_block, Cell("llama", chunk=7, cache="radix")),
    "an old table": (
        preempted_blocks_stay_in_the_runners_table, Cell("llama", chunk=7, pool="recompute")),
    "no window": (windows_are_forgotten, Cell("mistral", path="panels")),
    # Sampling.
    "the draw after a preemption": (
        the_draw_moves_on_after_a_preemption, Cell("llama", chunk=32, pool="recompute")),
    "forks draw the same": (forks_draw_the_same, Cell("llama", cache="hash")),
    "edits ignore earlier drafts": (edits_ignore_earlier_drafts, DRAFTED),
    "rejected drafts stay in the counts": (
        swap(Edits, "snapshot", lambda self: lambda: None), Cell(chunk=7, drafts="wrong")),
    "accepted tokens are not counted": (swap(Sampler, "append_run", lambda *_: None), DRAFTED),
    "the last token is counted twice": (
        appended(lambda at, tokens: (at, [*tokens, tokens[-1]])), DRAFTED),
    "positions are one too small": (
        choosing(lambda self, z, rows, at: (z, rows, [i - several(rows) for i in at])), DRAFTED),
    "logits of the position before": (
        choosing(lambda self, z, rows, at: (z.roll(1, 0) if several(rows) else z, rows, at)),
        WRONG),
    "log-probabilities of another row": (log_probabilities_of_another_row, DRAFTED),
    # Drafts.
    "a wrong draft is accepted": (
        swap(collect, "match", lambda x, drafted: min(match(x, drafted) + 1, len(x))), WRONG),
    "everything is accepted": (swap(collect, "match", lambda x, drafted: len(x)), WRONG),
    "the bonus token is lost, and drawn again": (
        swap(collect, "match", lambda x, drafted: min(match(x, drafted), len(drafted))), DRAFTED),
    "a text goes on behind its stop": (a_text_goes_on_behind_its_stop, DRAFTED),
    "drafts of the next row": (drafts_of_the_next_row, DRAFTED),
    "more drafts than there is room for": (
        swap(Speculator, "_valid", lambda self, given, row: (list(given), None)),
        Cell(chunk=7, cache="radix", pool="recompute", drafts="too many")),
    "a row with a token on the device drafts": (
        a_row_with_a_token_on_the_device_drafts, Cell(chunk=7, overlaps=True, drafts="right")),
    "vLLM#28558: resumed rows keep their drafts": (
        resumed_rows_keep_their_drafts,
        Cell(chunk=7, cache="radix", pool="recompute", drafts="mostly right")),
    # Ranks.
    "KV head r mod Hkv": (
        swap(Split, "kv_heads", lambda self, n: range(self.rank % n, self.rank % n + 1)),
        Cell("llama", ranks="tp 4")),
    "no sum": (swap(shard.RowParallel, "apply", no_sum), Cell("mistral", ranks="tp 4")),
    "up of another rank": (
        swap(shard, "slice_of", up_of_another_rank), Cell("mistral", ranks="tp 4")),
    "shared experts summed again": (
        swap(shard.SummedMoE, "forward", summed_twice), Cell("deepseek_v3", ranks="tp 4")),
    "tokens of another row": (swap(Ranks, "note", of_another_row), Cell("mistral", ranks="pp 2")),
    "tokens are not learned": (
        swap(Ranks, "note", lambda *_: None), Cell("mistral", ranks="pp 2")),
    "a boundary rounds": (swap(ToNextStage, "add", twice_rounded), Cell("mistral", ranks="pp 2")),
    "a layer on both stages": (
        swap(Stage, "layers", lambda self, _: range(self.index, 2)), Cell("mistral", ranks="pp 2")),
    "experts of the second rank are the first's": (
        swap(OwnExperts, "forward",
             lambda self, x, weights, ids: self.experts(x, weights, ids % len(self.held))),
        Cell("qwen3_moe", ranks="experts 2")),
    "parts of other copies are left out": (
        swap(OwnExperts, "forward", lambda own, x, weights, ids: torch.zeros_like(x)),
        Cell("qwen3_moe", ranks="copies 2")),
    "a weight is another token's": (
        a_weight_is_another_tokens, Cell("qwen3_moe", ranks="copies 2")),
    "every copy gets the plan of the first": (
        every_copy_gets_the_plan_of_the_first, Cell("qwen3_moe", ranks="copies 2")),
    # Bits.
    "tiles are not padded": (swap(deterministic, "spans", unpadded), TILES),
    "attention over what is there": (
        swap(batch_invariant, "tiled_attention", untiled_attention),
        Cell("llama", "exact float32", "operations")),
    "experts over routed rows only": (
        swap(ops, "tiled_moe_experts",
             lambda x, up, down, weights, ids: ops.moe_experts(x, up, down, weights, ids)),
        Cell("qwen3_moe", "exact float32")),
    "sums from left to right": (swap(communicator, "tree_sum", left_to_right), BITS_4),
    "sums in the order of a ring": (swap(communicator, "tree_sum", ring), BITS_4),
    "parts are rounded": (swap(FixedSumMethod, "partial", rounded_parts), BITS),
    "as many parts as ranks": (
        swap(fixed_sums, "num_parts", as_many_as_ranks),
        Cell("llama", "exact float32", ranks="tp 2")),
    "the bias comes after the rounding": (swap(shard, "finished", last_bias), BITS),
}  # fmt: skip


def prepare(cell: Cell) -> None:
    """Compute what is right before anything is wrong."""
    if cell.exact and cpu.functions(torch.bfloat16) is None:
        pytest.skip(cpu.describe(torch.bfloat16))
    reference_of(cell)


@pytest.mark.mutation
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, cell = BUGS[name]
    prepare(cell)
    plant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017,PT011  (a difference, or the engine itself notices)
        check(cell)


@pytest.mark.mutation
@pytest.mark.parametrize("cell", sorted({cell for _, cell in BUGS.values()}, key=str), ids=str)
def test_the_same_cell_passes_without_a_bug(cell: Cell) -> None:
    prepare(cell)
    check(cell)
