"""Deliberate bugs of the scheduler and the cache: histories fail by the promise that each breaks.

Those that other engines shipped say so; of the others there are one or two for each promise.
`caught_by` is a pattern for "type: message" of the error that must follow.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from minillm.cache.blocks import AccountingError, BlockPool
from minillm.cache.hash_chain import HashChain
from minillm.cache.manager import BlockCopy, BlockManager, BlockTable
from minillm.cache.prefix import Match
from minillm.cache.radix import RadixTree
from minillm.scheduling import ahead, drafts, failed_rows, pipelined
from minillm.scheduling import scheduler as scheduler_file
from minillm.scheduling.admission import Admission
from minillm.scheduling.ahead import InFlight
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.plan import Row
from minillm.scheduling.policies import Policy
from minillm.scheduling.record import Counters, Drafted
from minillm.scheduling.request import Sequence, Status
from minillm.scheduling.rows import accept
from minillm.scheduling.scheduler import Scheduler
from tests.scheduling import machine, oracle
from tests.scheduling.machine import World, random_history
from tests.scheduling.test_pipelined import (
    test_all_have_their_turns_where_memory_is_short,
    test_chunks_of_a_prompt_follow_each_other,
    test_stages_have_work_while_there_are_sequences,
)
from tests.scheduling.worlds import AheadWorld, LateStagesWorld, LateWorld, StagesWorld

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]


@dataclass(frozen=True)
class Bug:
    """What is wrong, what must notice it, and in which engines it can show."""

    caught_by: str
    apply: Plant
    setup: Mapping[str, Any] = field(default_factory=dict)
    seeds: range = range(30)  # of the histories of which one must fail


BUGS: dict[str, Bug] = {}


def bug(name: str, caught_by: str, seeds: range = range(30), **setup: Any) -> Any:
    """Register a function that plants a bug."""

    def register(apply: Plant) -> Plant:
        BUGS[name] = Bug(caught_by, apply, setup, seeds)
        return apply

    return register


def swap(owner: Any, name: str, wrong: Any) -> Plant:
    """Something else in the place of an attribute."""
    return lambda patch: patch.setattr(owner, name, wrong)


# ---- scheduling ----------------------------------------------------------------------------------


@bug("nano-vllm: the cap bounds the step, not the running set", r"sequences are running")
def cap_of_the_step(patch: Patch) -> None:
    rows = property(lambda self: len(self.in_flight), lambda self, value: None)
    patch.setattr(Scheduler, "num_seqs", rows, raising=False)
    patch.setattr("tests.scheduling.machine.check_invariants", lambda scheduler: None)


@bug("nano-vllm: a step with a prefill has no decode", r"Broken: decode")
def arrivals_first(patch: Patch) -> None:
    take = Scheduler._take_running

    def starve(self: Scheduler, plan: Any, budget: int) -> int:
        if self.waiting:
            self._admit(plan, budget)
        return 0 if plan.rows else take(self, plan, budget)

    patch.setattr(Scheduler, "_take_running", starve)


@bug("the budget is forgotten", r"Broken: limits: \d+, tokens in a step")
def no_budget(patch: Patch) -> None:
    chunk = Scheduler._chunk
    patch.setattr(
        Scheduler, "_chunk", lambda self, one, budget: chunk(self, one, 10**6 * (budget > 0))
    )


@bug("the first in line is preempted, not the last", r"Broken: order.*preempted for one behind")
def wrong_victim(patch: Patch) -> None:
    def first(self: Scheduler, sequence: Sequence) -> Sequence | None:
        free = [one for one in self.running if one.seq_id not in self.in_flight]
        return free[0] if free[0] is not sequence else None

    patch.setattr(Scheduler, "_victim", first)


@bug("the shortest prompt first, without a bound", r"Broken: order.*overtakes")
def unbounded_shortest(patch: Patch) -> None:
    policy = Policy(lambda request, arrival, cached: (request.max_computed, arrival))
    init = Scheduler.__init__
    patch.setattr(
        Scheduler, "__init__", lambda self, config, blocks: init(self, config, blocks, policy)
    )


bug("reserved blocks are given to arrivals", r"Broken: limits: reserved, but preempted")(
    swap(Admission, "num_reserved_for", lambda self, sequence: 0)
)
bug("swap gives up although host memory has room", r"Broken: swap: .*was dropped|AccountingError")(
    swap(BlockManager, "can_swap_out", lambda self, table: len(table.blocks) == 1)
)


@bug("recomputation counts as prefix hits", r"Broken: counters: prefix hits")
def recomputed_hits(patch: Patch) -> None:
    begin = Scheduler._begin

    def forget(self: Scheduler, sequence: Sequence, match: Match) -> None:
        sequence.report = None
        begin(self, sequence, match)

    patch.setattr(Scheduler, "_begin", forget)


@bug("the runner is not told who left", r"Broken: runner")
def nobody_dropped(patch: Patch) -> None:
    stop = Scheduler._stop_running

    def silent(self: Scheduler, sequence: Sequence) -> None:
        stop(self, sequence)
        self._dropped = []

    patch.setattr(Scheduler, "_stop_running", silent)


@bug("a refused request leaves a trace", r"Broken: refusal: it left traces")
def refused_too_late(patch: Patch) -> None:
    add = Scheduler.add

    def count_first(self: Scheduler, request: Any) -> Sequence:
        self.counters.num_prompt_tokens += 1
        sequence = add(self, request)
        self.counters.num_prompt_tokens -= 1
        return sequence

    patch.setattr(Scheduler, "add", count_first)


@bug("mini-sglang: abort and end release the same blocks", r"AccountingError: Block \d+")
def double_free(patch: Patch) -> None:
    finish = Scheduler.finish

    def twice(self: Scheduler, seq_id: int, *why: Any) -> None:
        sequence = self.sequences.get(seq_id)
        if sequence is not None and seq_id in self.in_flight:
            self.blocks.pool.release(sequence.table.blocks)
        finish(self, seq_id, *why)

    patch.setattr(Scheduler, "finish", twice)


@bug("abort frees what a plan still writes", r"Broken: written slot")
def abort_frees_at_once(patch: Patch) -> None:
    finish = Scheduler.finish

    def at_once(self: Scheduler, seq_id: int, *why: Any) -> None:
        sequence = self.sequences.get(seq_id)
        finish(self, seq_id, *why)
        if sequence is not None:
            self.blocks.release(sequence.table)

    patch.setattr(Scheduler, "finish", at_once)


@bug("a failed sample ends nothing", r"Broken: (accounting|oracle: tokens of)")
def failure_goes_on(patch: Patch) -> None:
    def repeat(sequence: Sequence, tokens: Any) -> bool:
        again = sequence.token_ids[-1]
        return accept(sequence, [again if token is None else token for token in tokens])

    patch.setattr("minillm.scheduling.scheduler.accept", repeat)


# ---- blocks and the prefix cache -----------------------------------------------------------------

bug("no copy-on-write", r"Broken: written slot")(
    swap(BlockManager, "_must_copy", lambda self, table, start: False)
)


@bug("copy-on-write looks at references only", r"Broken: (written slot: .*is cached|index)")
def copy_by_references(patch: Patch) -> None:
    def must_copy(self: BlockManager, table: BlockTable, start: int) -> bool:
        place = start // self.block_size
        return place < len(table.blocks) and self.pool.ref_counts[table.blocks[place]] > 1

    patch.setattr(BlockManager, "_must_copy", must_copy)


@bug("a copy is made in the books only", r"Broken: (oracle|unwritten|written slot)")
def unplanned_copy(patch: Patch) -> None:
    grow = BlockManager.grow

    def silent(self: BlockManager, table: BlockTable, start: int, end: int) -> BlockCopy | None:
        copy = grow(self, table, start, end)
        return None if copy is None else BlockCopy(copy.target, copy.target)

    patch.setattr(BlockManager, "grow", silent)


@bug("the beginning of a sequence is evicted before its end", r"Broken: eviction: beginning first")
def forward_release(patch: Patch) -> None:
    release = BlockPool.release
    patch.setattr(BlockPool, "release", lambda self, blocks: release(self, blocks[::-1]))


@bug("cached blocks are evicted before unused ones", r"Broken: eviction: uncached")
def no_order(patch: Patch) -> None:
    release = BlockPool.release

    def all_to_the_back(self: BlockPool, blocks: Any) -> None:
        release(self, blocks)
        for block in reversed(blocks):
            if block in self._free:
                self._free.move_to_end(block)

    patch.setattr(BlockPool, "release", all_to_the_back)


def insert_then(rewrite: Callable[[BlockManager, BlockTable, int, int], None]) -> Plant:
    """`index_blocks` as engines have it that merge duplicates: `rewrite` gets the table, the
    place of a block, and the older block with the same contents."""
    index_blocks = BlockManager.index_blocks

    def merge(
        self: BlockManager, table: BlockTable, token_ids: Any, num_computed: int, step: int = 0
    ) -> None:
        index_blocks(self, table, token_ids, num_computed, step)
        match = self.match(token_ids, num_computed // self.block_size * self.block_size, table.salt)
        for place, older in enumerate(match.blocks):
            if table.blocks[place] != older:
                rewrite(self, table, place, older)

    return swap(BlockManager, "index_blocks", merge)


def free_duplicate(manager: BlockManager, table: BlockTable, place: int, older: int) -> None:
    if manager.pool.ref_counts[table.blocks[place]] == 1:
        manager.pool.release([table.blocks[place]])


def free_behind_the_runner(
    manager: BlockManager, table: BlockTable, place: int, older: int
) -> None:
    """With books that agree: only the runner's table is not rewritten."""
    if older not in table.blocks:
        manager.pool.share([older])
        manager.pool.release([table.blocks[place]])
        table.blocks[place] = older


bug("mini-sglang: a duplicate is freed, its table not rewritten", r"AccountingError: Block \d+")(
    insert_then(free_duplicate)
)
bug("mini-sglang: a duplicate is freed behind the runner", r"Broken: (oracle|unwritten)")(
    insert_then(free_behind_the_runner)
)


@bug("a whole prompt is reused, its last token too", r"Broken: (index|limits)")
def uncapped_hit(patch: Patch) -> None:
    def match(self: Admission, sequence: Sequence) -> Match:
        tokens, salt = sequence.token_ids, sequence.request.cache_salt
        return self.blocks.match(tokens, len(tokens), salt)

    patch.setattr(Admission, "match", match)


@bug("prompt logprobs come from a cached prompt", r"Broken: index: \d+ tokens reused, at most 0")
def logprobs_reuse(patch: Patch) -> None:
    def match(self: Admission, sequence: Sequence) -> Match:
        tokens, salt = sequence.token_ids, sequence.request.cache_salt
        return self.blocks.match(tokens, len(tokens) - 1, salt)

    patch.setattr(Admission, "match", match)


@bug("the hash chain ignores salts", r"Broken: (oracle|index)", prefix_cache="hash")
def hash_without_salt(patch: Patch) -> None:
    start = HashChain.start
    patch.setattr(HashChain, "start", lambda self, salt: start(self, ""))


@bug("the radix tree ignores salts", r"Broken: (oracle|index)", prefix_cache="radix")
def radix_without_salt(patch: Patch) -> None:
    start = RadixTree.start
    patch.setattr(RadixTree, "start", lambda self, salt: start(self, ""))


@bug("radix forgets a block, not those below", r"Broken: index.*kept", prefix_cache="radix")
def radix_keeps_orphans(patch: Patch) -> None:
    def forget(self: RadixTree, block: int) -> None:
        node = self._nodes.pop(block)
        if node.parent is not None:
            node.parent.remove(node)

    patch.setattr(RadixTree, "forget", forget)


# ---- rows that read what another row of their step writes ----------------------------------------

CROWDED = {"capacity": 96, "block_size": 2, "max_num_seqs": 8, "spare_budget": 64, "threshold": 0}
CROWDED |= {"chunked": True, "admission": "watermark", "watermark": 0.0}
HASHED, TREE = CROWDED | {"prefix_cache": "hash"}, CROWDED | {"prefix_cache": "radix"}
INVALIDATE = "minillm.scheduling.scheduler.invalidate"

bug("a short reader comes before its writer", r"Broken: unwritten: .*reads it", range(15),
    **HASHED)(swap(BlockManager, "is_written_by", lambda self, step, match: False))  # fmt: skip
bug("a block is copied before it is written", r"Broken: (oracle|unwritten)", range(15), **TREE)(
    swap(BlockManager, "match", lambda self, *arguments: self.index.match(*arguments))
)
bug("what a failed row wrote is still found", r"Broken: (index|unwritten|oracle)", range(15),
    **HASHED)(swap(BlockManager, "forget", lambda self, table: None))  # fmt: skip
bug("what was written counts as coming for ever", r"Broken: books: .*coming")(
    swap(BlockManager, "mark_written", lambda self, step: None)
)


@bug("readers of a failed row go on", r"Broken: unwritten: .*reads it", range(15), **HASHED)
def readers_go_on(patch: Patch) -> None:
    def only_the_writer(rows: Any, suspect: Any, in_flight: Any, blocks: BlockManager) -> None:
        for seq_id in suspect:
            blocks.forget(in_flight[seq_id].table)

    patch.setattr(INVALIDATE, only_the_writer)


@bug("the whole step of a failed row is void", r"Broken: unwritten: .*nothing", range(15), **HASHED)
def all_void(patch: Patch) -> None:
    def everyone(rows: Any, suspect: Any, in_flight: Any, blocks: BlockManager) -> None:
        failed_rows.invalidate(rows, suspect, in_flight, blocks)
        for sequence in in_flight.values():
            sequence.is_void |= sequence.seq_id not in suspect

    patch.setattr(INVALIDATE, everyone)


# ---- carrying a plan out -------------------------------------------------------------------------

RARE = {"preemption_mode": "swap", "host": 3.0, "admission": "watermark", "watermark": 0.0}
LARGE = {"prefix_cache": None, "block_size": 8, "capacity": 64, "max_num_seqs": 8}
LITTLE = {"prefix_cache": "radix", "block_size": 2, "capacity": 24, "max_num_seqs": 12}
ORDERS: Mapping[str, tuple[str, range, Mapping[str, Any]]] = {
    "copies after the writes": ("swap_out swap_in write copies", range(30), {}),
    "swap out after the writes": ("copies swap_in write swap_out", range(30), {}),
    "swap in after the writes": ("swap_out copies write swap_in", range(30), {}),
    "swap out after the copies": (
        "copies swap_out swap_in write", range(60, 80), RARE | LARGE),
    "swap in before the copies": (
        "swap_out swap_in copies write", range(125, 140), RARE | LITTLE | {"policy": "priority"}),
}  # fmt: skip
for order, (names, seeds, setup) in ORDERS.items():
    bug(f"runner: {order}", "Broken: (oracle|unwritten)", seeds, **setup)(
        swap(oracle, "ORDER", ("forget", "learn", *names.split()))
    )

# ---- drafts --------------------------------------------------------------------------------------

DRAFTS = {"drafts": 4, "disable_by_batch": None, "draft_context": None, "uneven": False}
FEW = range(20)
end_after, room = Row.end_after, Drafts._room

bug(
    "as many positions count as computed as were drafted", r"Broken|AccountingError", FEW, **DRAFTS
)(swap(Row, "end_after", lambda self, accepted: self.start + self.num_tokens))
bug("the bonus token's position counts as computed", r"Broken|AccountingError", FEW, **DRAFTS)(
    swap(Row, "end_after", lambda self, n: end_after(self, n) + (self.num_logits > 1 == n))
)
bug("blocks of rejected drafts are kept", r"Broken: (books|drafts): .*holds", FEW, **DRAFTS)(
    swap(BlockManager, "trim", lambda self, table, num_tokens: None)
)
bug(
    "k is not limited by the tokens that are left",
    r"Broken: limits: beyond the last token",
    FEW,
    **DRAFTS,
)(swap(Drafts, "_room", lambda self, sequence: 10**6))
bug("the last token is drafted, too", r"Broken: limits: beyond the last token", FEW, **DRAFTS)(
    swap(Drafts, "_room", lambda self, sequence: room(self, sequence) + 1)
)
bug("vLLM#30618: a prefill chunk drafts", r"Broken|Error", FEW, **DRAFTS)(
    swap(drafts, "can_draft",
         lambda row, sequence: bool(row.num_tokens and row.num_logits) and not row.num_forks
         and sequence.status is Status.RUNNING and not sequence.num_pending))  # fmt: skip


@bug("vLLM: blocks are indexed before rejected drafts are cut", r"Broken|AccountingError", FEW,
     **DRAFTS)  # fmt: skip
def indexed_before_cut(patch: Patch) -> None:
    commit = Scheduler.commit

    def early(self: Scheduler, plan: Any, *results: Any) -> Any:
        for row in plan.rows:
            table = self.in_flight[row.seq_id].table
            if row.num_logits > 1:
                tokens = [*self.in_flight[row.seq_id].token_ids, *[0] * 9]
                self.blocks.index_blocks(table, tokens, row.start + row.num_tokens)
        return commit(self, plan, *results)

    patch.setattr(Scheduler, "commit", early)


@bug("a swapped sequence comes back with its drafts counted", r"Broken|AccountingError", FEW,
     **DRAFTS, preemption_mode="swap", host=3.0)  # fmt: skip
def swapped_with_drafts(patch: Patch) -> None:
    settle = Drafts.free_rejected

    def counted(self: Drafts, sequence: Any, own: Any, num_drafted: Any, blocks: Any) -> Drafted:
        drafted = settle(self, sequence, own, num_drafted, blocks)
        sequence.num_computed += drafted.num_drafted - drafted.num_accepted
        return drafted

    patch.setattr(Drafts, "free_rejected", counted)


@bug("drafts take the budget before other rows", r"Broken: (drafts: they change|decode|progress)",
     FEW, **DRAFTS)  # fmt: skip
def drafts_first(patch: Patch) -> None:
    take = Scheduler._take_running

    def less(self: Scheduler, plan: Any, budget: int) -> int:
        wanted = sum(one.num_uncomputed == 1 for one in self.running)
        return take(self, plan, max(budget - wanted, 1))

    patch.setattr(Scheduler, "_take_running", less)


@bug("acceptance is counted one place too far", r"Broken: counters: accepted at|IndexError", FEW,
     **DRAFTS)  # fmt: skip
def wrong_place(patch: Patch) -> None:
    add = Counters.add_drafts

    def shifted(self: Counters, drafted: Drafted) -> None:
        add(self, drafted)
        if drafted.num_accepted:
            self.num_accepted_at[0] -= 1
            self.num_accepted_at[-1] += 1

    patch.setattr(Counters, "add_drafts", shifted)


def first_failure(bug: Bug) -> str | None:
    """How a history fails."""
    for seed in bug.seeds:
        try:
            random_history(seed, Counter(), **bug.setup)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.mutation
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught_by_the_promise_it_breaks(name: str, monkeypatch: Patch) -> None:
    BUGS[name].apply(monkeypatch)
    failure = first_failure(BUGS[name])
    assert failure is not None, "nothing noticed"
    assert re.search(BUGS[name].caught_by, failure), failure


BY_THE_LIBRARY = [name for name, bug in BUGS.items() if bug.caught_by.startswith("Accounting")]


@pytest.mark.mutation
@pytest.mark.parametrize("name", BY_THE_LIBRARY)
def test_what_the_library_checks_itself_is_caught_without_it(name: str, monkeypatch: Patch) -> None:
    """The checks of these tests stand alone: they share no code with `check_invariants`."""
    monkeypatch.setattr("tests.scheduling.machine.check_invariants", lambda scheduler: None)
    BUGS[name].apply(monkeypatch)
    assert first_failure(BUGS[name]) is not None, "nothing noticed"


# One bug for each setup and series.
SERIES = {str((sorted(bug.setup.items(), key=str), bug.seeds)): bug for bug in BUGS.values()}


@pytest.mark.mutation
@pytest.mark.parametrize("series", SERIES)
def test_the_same_histories_pass_without_a_bug(series: str) -> None:
    """So what fails above is the bug."""
    assert first_failure(SERIES[series]) is None


# ---- plans in flight -----------------------------------------------------------------------------


def blocks_are_free_while_a_plan_writes(patch: Patch) -> None:
    leave = InFlight.remove_row

    def left(self: InFlight, seq_id: int) -> Sequence:
        sequence = self[seq_id]
        sequence.num_in_flight = 1
        sequence = leave(self, seq_id)
        return self.setdefault(seq_id, sequence) if len(self.plans) else sequence

    patch.setattr(InFlight, "remove_row", left)


def tokens_stay_pending(patch: Patch) -> None:
    advance = Sequence.advance

    def advanced(self: Sequence, start: int, end: int) -> int:
        pending = self.num_pending
        again = advance(self, start, end)
        self.num_pending = pending
        return again

    patch.setattr(Sequence, "advance", advanced)


def void_sequences_give_up_blocks_that_a_plan_uses(patch: Patch) -> None:
    commit = Scheduler.commit

    def at_once(self: Scheduler, plan: Any, *results: Any) -> list[Sequence]:
        for sequence in self.in_flight.values():
            if sequence.is_void:
                self.blocks.release(sequence.table)
        return commit(self, plan, *results)

    patch.setattr(Scheduler, "commit", at_once)


def a_row_that_verifies_counts_as_accepted(patch: Patch) -> None:
    patch.setattr(Drafts, "wants", lambda self, sequence, num_running: False)
    predictable = ahead.is_predictable
    patch.setattr(
        ahead,
        "is_predictable",
        lambda row, sequence: predictable(
            row._replace(num_logits=min(row.num_logits, 1)), sequence
        ),
    )


def a_token_that_is_not_known(patch: Patch) -> None:
    """As if the device had it, which is another stage's: the look ahead of one stage."""

    def look(flights: Any, running: Any, blocks: Any, config: Any, drafts: Any = None) -> bool:
        for row, sequence in ahead.rows_in_flight(flights):
            sequence.num_computed = row.start + row.num_tokens
            sequence.num_pending = row.num_logits
        return 0 < len(flights.plans) < config.num_stages and bool(running)

    patch.setattr(scheduler_file, "prepare_ahead", look)


def the_first_always_go_first(patch: Patch) -> None:
    order, one = pipelined.scheduling_order, SchedulerConfig()
    patch.setattr(scheduler_file, "scheduling_order", lambda running, config: order(running, one))
    patch.setattr(ahead, "has_room", lambda *_: False)


AHEAD, STAGES = (AheadWorld, LateWorld), (StagesWorld, LateStagesWorld)
IN_FLIGHT: Mapping[str, tuple[Plant, tuple[type[World], ...]]] = {
    "blocks are free while a plan writes": (blocks_are_free_while_a_plan_writes, AHEAD),
    "memory is not counted": (swap(ahead, "has_room", lambda *_: True), AHEAD),
    "the last token is computed": (swap(ahead, "end_of", lambda sequence: 10**9), AHEAD),
    "tokens stay pending": (tokens_stay_pending, AHEAD),
    "void sequences give up blocks": (void_sequences_give_up_blocks_that_a_plan_uses, AHEAD),
    "a row that verifies counts as accepted": (a_row_that_verifies_counts_as_accepted, AHEAD),
    "a token that is not known": (a_token_that_is_not_known, STAGES),
    "memory is not counted, in stages": (swap(ahead, "has_room", lambda *_: True), STAGES),
    "the first always go first": (the_first_always_go_first, STAGES),
    "issue B12 of the notes: all in one plan": (
        swap(scheduler_file, "most_decoding", lambda num_running, config: num_running), STAGES),
    "issue B13 of the notes: chunks wait": (
        swap(ahead, "is_predictable", lambda row, sequence: False), STAGES),
}  # fmt: skip


def in_flight(patch: Patch, worlds: tuple[type[World], ...], setup: Mapping[str, Any]) -> None:
    """Histories of some worlds, and of stages the single cases."""
    if worlds is STAGES:
        test_stages_have_work_while_there_are_sequences(3)
        test_chunks_of_a_prompt_follow_each_other()
    for world in worlds:
        patch.setattr(machine, "World", world)
        for seed in range(60):
            random_history(seed, Counter(), **setup)
    if worlds is STAGES:
        test_all_have_their_turns_where_memory_is_short(patch)


@pytest.mark.mutation
@pytest.mark.parametrize("name", IN_FLIGHT)
def test_a_planted_bug_of_plans_in_flight_is_caught(name: str, monkeypatch: Patch) -> None:
    plant, worlds = IN_FLIGHT[name]
    plant(monkeypatch)
    with pytest.raises((oracle.Broken, AccountingError, AssertionError, KeyError, IndexError)):
        in_flight(monkeypatch, worlds, DRAFTS if "verifies" in name else {})
