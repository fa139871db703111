"""Whatever the engine does to a request, its tokens are those that it gets alone.

Each family runs 12 cells of the matrix of chunk sizes, prefix caches, pools and completions in
which any two settings meet (on the embedded model, whose steps cost most, all 9 of these with
longer chunks and one with chunks of one token). One family also runs the cells that find planted
bugs. The rest of the matrix is marked slow.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm.cache.manager import BlockManager
from minillm.errors import EngineDeadError
from minillm.execution.runner import Runner
from minillm.models.forward_pass import Chunk
from minillm.sampling.sampler import Sampler
from minillm.scheduling.invariants import check_invariants
from tests.engine.families import (
    AGAIN,
    BLOCK,
    CACHES,
    CHUNKS,
    COUNTS,
    FAMILIES,
    LONG_PROMPT,
    MARGIN,
    MATRIX,
    POOLS,
    Cell,
    Reference,
    Run,
    pairwise_cells,
    run_cell,
)
from tests.engine.small import num_ahead

CELLS = {
    "llama": pairwise_cells(0),
    "deepseek_v2": pairwise_cells(0),
    "qwen3_moe": pairwise_cells(1),
    "tiny": [cell for cell in pairwise_cells(2) if cell.chunk != 1 or cell.pool == "recompute"],
}
OVERLAPPING = {
    "llama": pairwise_cells(0),
    "deepseek_v2": pairwise_cells(1)[::3],
    "qwen3_moe": pairwise_cells(2)[1::3],
}
REST = {name: [cell for cell in MATRIX if cell not in cells] for name, cells in CELLS.items()}


def named(table: dict[str, list[Cell]]) -> list:
    """Parameters: each family's cells."""
    return [
        pytest.param(family, cell, id=f"{family}-{cell}")
        for family, cells in table.items()
        for cell in cells
    ]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str | Path]:
    """What to give to `LLM` for a family; written when first asked for."""
    written: dict[str, str | Path] = {"tiny": "tiny"}

    def get(family: str) -> str | Path:
        if family not in written:
            tiny = FAMILIES[family]
            assert tiny is not None
            written[family] = tiny.write(tmp_path_factory.mktemp(family)).folder
        return written[family]

    return get


@pytest.fixture(scope="module")
def reference_of(model_of) -> Callable[[str, int], Reference]:
    """What each request gives alone, computed once per family and number of completions."""
    known: dict[tuple[str, int], Reference] = {}

    def get(family: str, n: int) -> Reference:
        if (family, n) not in known:
            known[family, n] = Reference(model_of(family), n)
        return known[family, n]

    return get


@pytest.fixture(scope="module")
def tally() -> Iterator[Counter[str]]:
    """Near ties are an excuse, so they must be rare: at most one completion in a hundred."""
    count: Counter[str] = Counter()
    yield count
    assert count["excused"] <= max(1, count["completions"] // 100), count


def check_claims(cell: Cell, run: Run) -> None:
    """A run counts only if it did what the cell is there for."""
    scheduler = run.llm.engine.scheduler
    counters, outputs = scheduler.counters, [*run.first, *run.again]
    assert counters.num_mixed_steps > 0
    assert counters.max_num_running >= 8
    longest_prompt = max(len(job.ids) for job in run.jobs)
    if cell.chunk:
        assert run.longest_row == cell.chunk
    else:
        assert run.longest_row > longest_prompt - BLOCK  # of which a radix tree may find some
    hits = sum(output.metrics.num_cached_tokens for output in outputs)
    assert hits == counters.num_cached_tokens
    assert (hits > 0) == (cell.cache != "off")
    if cell.cache != "off" and cell.pool == "ample":
        found = run.again[AGAIN.index(LONG_PROMPT)].metrics.num_cached_tokens
        assert longest_prompt - 1 - found < BLOCK
    if cell.n > 1:
        assert scheduler.blocks.num_copies > 0
    preempted = counters.num_preemptions_recompute, counters.num_preemptions_swap
    assert [count > 0 for count in preempted] == [cell.pool == "recompute", cell.pool == "swap"]
    assert sum(output.metrics.num_preemptions for output in outputs) == sum(preempted)
    again = sum(output.metrics.num_recomputed_tokens for output in outputs)
    assert again == counters.num_recomputed_tokens
    if cell.pool != "recompute":
        assert again == 0
    elif cell.cache == "off":
        assert again > 0
    assert (run.num_swapped_in > 0) == (cell.pool == "swap")
    check_invariants(scheduler)
    assert scheduler.blocks.pool.num_free == cell.num_blocks


def check_cell(
    family: str, cell: Cell, model_of, reference_of, tally: Counter[str], **more: Any
) -> Run:
    """Run one cell, see that it did what it is there for, and compare."""
    run = run_cell(cell, model_of(family), **more)
    check_claims(cell, run)
    found, excused = reference_of(family, cell.n).differences(run)
    tally["completions"] += sum(len(output.outputs) for output in (*run.first, *run.again))
    tally["excused"] += len(excused)
    assert not found
    return run


@pytest.mark.parametrize(("family", "cell"), named(CELLS))
def test_tokens_are_those_that_a_request_gets_alone(family, cell, model_of, reference_of, tally):
    check_cell(family, cell, model_of, reference_of, tally)


@pytest.mark.parametrize(("family", "cell"), named(OVERLAPPING))
def test_also_where_steps_overlap(family, cell, model_of, reference_of, tally):
    run = check_cell(family, cell, model_of, reference_of, tally, async_scheduling=True)
    assert num_ahead(run.llm) > 20


@pytest.mark.slow
@pytest.mark.parametrize(("family", "cell"), named(REST))
def test_the_rest_of_the_matrix(family, cell, model_of, reference_of, tally):
    check_cell(family, cell, model_of, reference_of, tally)


def test_the_cells_are_the_whole_matrix_and_any_two_settings_meet():
    assert len(set(map(str, MATRIX))) == 4 * 3 * 3 * 2
    axes = {"chunk": CHUNKS, "cache": CACHES, "pool": POOLS, "n": COUNTS}
    for turn, (one, other) in product(range(3), combinations(axes, 2)):
        met = {(getattr(cell, one), getattr(cell, other)) for cell in pairwise_cells(turn)}
        assert met == set(product(axes[one], axes[other]))


# ---- the reference, and what counts as equal -------------------------------------------------


@pytest.mark.parametrize(("family", "n"), [*product(("llama", "deepseek_v2", "qwen3_moe"), (3,)),
                                           ("tiny", 1)])  # fmt: skip
def test_the_reference_is_generation_without_scheduler_blocks_or_cache(family, n, reference_of):
    reference, wrong, ties = reference_of(family, n), [], 0
    forward = reference.llm.engine.forward_pass
    for index, (job, output) in enumerate(zip(reference.jobs, reference.outputs, strict=True)):
        for completion in output.outputs:
            ids = list(completion.token_ids)
            whole = [*job.ids, *ids[:-1]]
            hidden, _ = forward.run([Chunk(0, 0, whole)], forward.allocate(1, len(whole)))
            logits = forward.logits(hidden[len(job.ids) - 1 :])
            for step, token in enumerate(ids):
                row = logits[step : step + 1].clone()
                if reference.choose(index, completion.index, ids[:step], row.clone()) == token:
                    continue
                row[0, token] += MARGIN
                ties += 1
                if reference.choose(index, completion.index, ids[:step], row) != token:
                    wrong.append((index, completion.index, step))
    assert not wrong
    assert ties <= 1


def test_a_wrong_token_is_not_excused_and_a_near_tie_is(reference_of, monkeypatch):
    reference = reference_of("llama", 1)
    for index, output in enumerate(reference.outputs):
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        for step in {0, len(ids) // 2, len(ids) - 1}:
            wrong = [*ids[:step], (ids[step] + 1) % 128, *ids[step + 1 :]]
            other = replace(completion, token_ids=wrong)
            assert not reference.near_tie(index, completion, other, step)
        short = replace(completion, token_ids=ids[:-1])
        assert not reference.near_tie(index, completion, short, len(ids) - 1)
    completion = reference.outputs[0].outputs[0]
    best = completion.token_ids[0]
    second = (best + 1) % 128
    other = replace(completion, token_ids=[second, *completion.token_ids[1:]])
    for gap, excused in ((0.5, True), (2.0, False)):
        logits = torch.zeros(1, 128)
        logits[0, best], logits[0, second] = 5.0, 5.0 - gap * MARGIN
        monkeypatch.setattr(reference, "logits", lambda *_, logits=logits: logits.clone())
        assert reference.near_tie(0, completion, other, 0) is excused


# ---- what the matrix finds -------------------------------------------------------------------

Broken = Callable[[pytest.MonkeyPatch], None]


def without_moves(what: str) -> Broken:
    """The runner leaves one kind of block moves out."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        move = Runner._move_blocks
        monkeypatch.setattr(
            Runner, "_move_blocks", lambda self, plan: move(self, replace(plan, **{what: []}))
        )

    return plant


def positions_of_a_chunk_begin_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Runner.batch

    def broken(self, rows):
        batch = build(self, rows)
        positions = batch.positions.clone()
        bounds = batch.query_start.tolist()
        for row, start, end in zip(rows, bounds[:-1], bounds[1:], strict=True):
            if row.num_tokens > 1:
                positions[start:end] -= row.start
        return replace(batch, positions=positions)

    monkeypatch.setattr(Runner, "batch", broken)


def tables_keep_the_source_of_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Runner._update_rows

    def broken(self, plan):
        sources = {copy.target: copy.source for copy in plan.copies}
        rows = [
            row._replace(blocks=tuple(sources.get(block, block) for block in row.blocks))
            for row in plan.rows
        ]
        update(self, replace(plan, rows=rows))

    monkeypatch.setattr(Runner, "_update_rows", broken)


def prefix_hits_name_a_wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order would not show: keys know their positions. So the last is a neighbour."""
    match = BlockManager.match

    def broken(self, *arguments):
        found = match(self, *arguments)
        others = [block for block in range(self.pool.num_blocks) if block not in found.blocks]
        return found._replace(blocks=[*found.blocks[:-1], *others[: bool(found.blocks)]])

    monkeypatch.setattr(BlockManager, "match", broken)


def cached_blocks_are_written_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self, table, start):
        place = start // self.block_size
        return place < len(table.blocks) and self.pool.ref_counts[table.blocks[place]] > 1

    monkeypatch.setattr(BlockManager, "_must_copy", broken)


def the_draw_moves_on_after_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    set_row, choose = Sampler.set_row, Sampler.choose

    def seen(self, row, request):
        came_back = bool(request.output_token_ids) and not request.sample_index
        self.__dict__.setdefault("came_back", {})[row] = came_back
        set_row(self, row, request)

    def broken(self, logits, rows, positions, *rest):
        later = [at + self.came_back[row] for at, row in zip(positions, rows, strict=True)]
        return choose(self, logits, rows, later, *rest)

    monkeypatch.setattr(Sampler, "set_row", seen)
    monkeypatch.setattr(Sampler, "choose", broken)


def forks_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = Sampler._pack

    def broken(self, *arguments):
        right = pack(self, *arguments)
        return right._replace(sample_index=torch.zeros_like(right.sample_index))

    monkeypatch.setattr(Sampler, "_pack", broken)


def preempted_blocks_stay_in_the_runners_table(monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(Runner, "_update_rows", broken)


PLANTED: dict[str, tuple[Broken, Cell]] = {
    "copies are not made": (without_moves("copies"), Cell(7, "off", "ample", 3)),
    "a partial hit is not copied": (without_moves("copies"), Cell(64, "radix", "ample", 1)),
    "nothing is swapped in": (without_moves("swap_in"), Cell(64, "off", "swap", 1)),
    "nothing is swapped out": (without_moves("swap_out"), Cell(7, "hash", "swap", 3)),
    "positions of a chunk": (positions_of_a_chunk_begin_at_zero, Cell(7, "off", "ample", 1)),
    "tables after a copy": (tables_keep_the_source_of_a_copy, Cell(0, "off", "ample", 3)),
    "wrong block, hash": (prefix_hits_name_a_wrong_block, Cell(0, "hash", "ample", 1)),
    "wrong block, radix": (prefix_hits_name_a_wrong_block, Cell(7, "radix", "ample", 3)),
    "cached blocks are written": (
        cached_blocks_are_written_without_a_copy,
        Cell(0, "radix", "ample", 1),
    ),
    "the draw after a preemption": (
        the_draw_moves_on_after_a_preemption,
        Cell(64, "off", "recompute", 3),
    ),
    "the draw after a swap": (the_draw_moves_on_after_a_preemption, Cell(7, "off", "swap", 3)),
    "forks draw the same": (forks_draw_the_same, Cell(0, "hash", "ample", 3)),
    "an old table": (preempted_blocks_stay_in_the_runners_table, Cell(7, "off", "recompute", 1)),
}


@pytest.mark.mutation
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_changes_tokens(name, overlaps, model_of, reference_of, monkeypatch):
    plant, cell = PLANTED[name]
    reference = reference_of("llama", cell.n)
    plant(monkeypatch)
    try:
        run = run_cell(cell, model_of("llama"), async_scheduling=overlaps)
    except EngineDeadError as error:
        pytest.fail(f"The engine itself noticed, so this shows nothing of the matrix: {error}")
    monkeypatch.undo()
    check_claims(cell, run)
    found, _ = reference.differences(run)
    assert found


OF_BUGS = {cell for _, cell in PLANTED.values()} - set(CELLS["llama"])


@pytest.mark.parametrize("cell", sorted(OF_BUGS, key=str), ids=str)
def test_the_same_cells_pass_without_a_bug(cell, model_of, reference_of, tally):
    check_cell("llama", cell, model_of, reference_of, tally)
