"""Deliberate bugs of the scheduler and the cache, each with the promise that it breaks.

Those that other engines shipped say so. A bug replaces a few methods through pytest's
`monkeypatch`; `caught_by` is a pattern for "type: message" of the error that must follow.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import pytest

from minillm.cache.blocks import BlockPool
from minillm.cache.hash_chain import Cursor, HashChain
from minillm.cache.manager import BlockCopy, BlockManager, BlockTable
from minillm.cache.prefix import Match, NoPrefixCache
from minillm.cache.radix import RadixTree
from minillm.scheduling import failed_rows
from minillm.scheduling.admission import Admission
from minillm.scheduling.policies import Policy
from minillm.scheduling.request import Sequence, Status
from minillm.scheduling.rows import accept, why_stalled
from minillm.scheduling.scheduler import Scheduler
from tests.scheduling import oracle

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Bug:
    """What is wrong, what must notice it, and in which engines it can show."""

    name: str
    caught_by: str
    apply: Callable[[Patch], None]
    setup: Mapping[str, Any] = field(default_factory=dict)
    seeds: range = range(30)  # of the histories of which one must fail


BUGS: list[Bug] = []


def bug(name: str, caught_by: str, seeds: range = range(30), **setup: Any) -> Any:
    """Register a function that plants a bug."""

    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS.append(Bug(name, caught_by, apply, setup, seeds))
        return apply

    return register


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


@bug("long prompts spend the budget before decodes", r"Broken: decode.*stalls")
def prefills_first(patch: Patch) -> None:
    def take(self: Scheduler, plan: Any, budget: int) -> int:
        for sequence in sorted(self.running, key=lambda one: one.num_uncomputed == 1):
            if sequence.status is Status.RUNNING:
                num_tokens = self._chunk(sequence, budget)
                if num_tokens and self._make_room(sequence, num_tokens, plan):
                    self._add_row(plan, sequence, num_tokens)
                    budget -= num_tokens
                else:
                    self.record.stalled.append(why_stalled(sequence, budget, self.blocks))
        return budget

    patch.setattr(Scheduler, "_take_running", take)


@bug("the budget is forgotten", r"Broken: limits: \d+, tokens in a step")
def no_budget(patch: Patch) -> None:
    def chunk(self: Scheduler, sequence: Sequence, budget: int) -> int:
        limit = self.config.long_prefill_token_threshold or sequence.num_uncomputed
        return min(sequence.num_uncomputed, limit) if budget > 0 else 0

    patch.setattr(Scheduler, "_chunk", chunk)


@bug("seats of forks to come are not kept", r"sequences are running")
def forks_without_seats(patch: Patch) -> None:
    patch.setattr(Scheduler, "_start_running", without_forks(Scheduler._start_running))
    patch.setattr(Scheduler, "_fork", with_seats(Scheduler._fork))


def without_forks(start: Any) -> Any:
    def broken(self: Scheduler, sequence: Sequence) -> None:
        start(self, sequence)
        self.num_seqs -= sequence.num_forks

    return broken


def with_seats(fork: Any) -> Any:
    def broken(self: Scheduler, parent: Sequence, index: int) -> Any:
        self.num_seqs += 1
        return fork(self, parent, index)

    return broken


@bug("the first in line is preempted, not the last", r"Broken: order.*preempted for one behind")
def wrong_victim(patch: Patch) -> None:
    def first(self: Scheduler, sequence: Sequence) -> Sequence | None:
        free = [one for one in self.running if one.seq_id not in self.in_flight]
        return free[0] if free[0] is not sequence else None

    patch.setattr(Scheduler, "_victim", first)


@bug("the shortest prompt first, without a bound", r"Broken: order.*overtakes")
def unbounded_shortest(patch: Patch) -> None:
    replace_policy(patch, Policy(lambda request, arrival, cached: (request.max_computed, arrival)))


@bug(
    "the most cached prompt first, without a bound",
    r"Broken: order: overtakes by",
    policy="longest_prefix_match",
)
def unbounded_match(patch: Patch) -> None:
    replace_policy(patch, Policy(lambda request, arrival, cached: (-cached, arrival), True))


def replace_policy(patch: Patch, policy: Policy) -> None:
    init = Scheduler.__init__
    patch.setattr(
        Scheduler, "__init__", lambda self, config, blocks: init(self, config, blocks, policy)
    )


@bug("reserved blocks are given to arrivals", r"Broken: limits: reserved, but preempted")
def no_pledge(patch: Patch) -> None:
    patch.setattr(Admission, "num_reserved_for", lambda self, sequence: 0)


@bug("a preempted sequence keeps its place", r"AccountingError.*computed more than it holds")
def preempted_keeps_place(patch: Patch) -> None:
    preempt = Scheduler._preempt

    def keep(self: Scheduler, victim: Sequence, winner: Sequence, plan: Any) -> None:
        computed = victim.num_computed
        preempt(self, victim, winner, plan)
        victim.num_computed = computed

    patch.setattr(Scheduler, "_preempt", keep)


@bug("recomputation counts as prefix hits", r"Broken: counters: prefix hits")
def recomputed_hits(patch: Patch) -> None:
    begin = Scheduler._begin

    def forget(self: Scheduler, sequence: Sequence, match: Match) -> None:
        sequence.report = None
        begin(self, sequence, match)

    patch.setattr(Scheduler, "_begin", forget)


@bug("a preempted fork counts as a new prompt", r"Broken: counters: (prefix hits|report)")
def forks_without_report(patch: Patch) -> None:
    fork = Scheduler._fork

    def forget(self: Scheduler, parent: Sequence, index: int) -> Sequence:
        child = fork(self, parent, index)
        child.report = None
        return child

    patch.setattr(Scheduler, "_fork", forget)


@bug("swap gives up although host memory has room", r"Broken: swap: .*was dropped|AccountingError")
def lazy_swap(patch: Patch) -> None:
    patch.setattr(BlockManager, "can_swap_out", lambda self, table: len(table.blocks) == 1)


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


# ---- ends ----------------------------------------------------------------------------------------


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


@bug(
    "only the last block is freed",
    r"AccountingError: Block \d+ has reference count 1, but is in 0 tables",
)
def last_block_only(patch: Patch) -> None:
    def release(self: BlockManager, table: BlockTable) -> None:
        self.pool.release(table.blocks[-1:])
        self.host.release(table.host_blocks)
        table.blocks, table.host_blocks = [], []

    patch.setattr(BlockManager, "release", release)


@bug("a failed sample ends nothing", r"Broken: (accounting|oracle: tokens of)")
def failure_goes_on(patch: Patch) -> None:
    def repeat(sequence: Sequence, tokens: Any) -> bool:
        again = sequence.token_ids[-1]
        return accept(sequence, [again if token is None else token for token in tokens])

    patch.setattr("minillm.scheduling.scheduler.accept", repeat)


# ---- blocks --------------------------------------------------------------------------------------


@bug("no copy-on-write", r"Broken: written slot")
def no_copy(patch: Patch) -> None:
    patch.setattr(BlockManager, "_must_copy", lambda self, table, start: False)


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


@bug("forks share without counting", r"AccountingError: Block \d+")
def uncounted_fork(patch: Patch) -> None:
    share = BlockPool.share
    fork = BlockManager.fork

    def uncounted(self: BlockManager, table: BlockTable) -> BlockTable:
        patch.setattr(BlockPool, "share", lambda self, blocks: None)
        child = fork(self, table)
        patch.setattr(BlockPool, "share", share)
        return child

    patch.setattr(BlockManager, "fork", uncounted)


@bug("a revived block stays in the free list", r"AccountingError: Block \d+")
def revived_but_free(patch: Patch) -> None:
    def share(self: BlockPool, blocks: Any) -> None:
        for block in blocks:
            self.num_revived += self.ref_counts[block] == 0
            self.ref_counts[block] += 1

    patch.setattr(BlockPool, "share", share)


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


# ---- prefix cache --------------------------------------------------------------------------------


def insert_then(rewrite: Callable[[BlockManager, BlockTable, int, int], None]) -> Any:
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

    return merge


@bug("mini-sglang: a duplicate is freed, its table not rewritten", r"AccountingError: Block \d+")
def duplicate_freed(patch: Patch) -> None:
    def rewrite(manager: BlockManager, table: BlockTable, place: int, older: int) -> None:
        if manager.pool.ref_counts[table.blocks[place]] == 1:
            manager.pool.release([table.blocks[place]])

    patch.setattr(BlockManager, "index_blocks", insert_then(rewrite))


@bug(
    "the same, with books that agree: only the runner's table is not rewritten",
    r"Broken: (oracle|unwritten)",
)
def duplicate_freed_behind_the_runner(patch: Patch) -> None:
    def rewrite(manager: BlockManager, table: BlockTable, place: int, older: int) -> None:
        if older not in table.blocks:
            manager.pool.share([older])
            manager.pool.release([table.blocks[place]])
            table.blocks[place] = older

    patch.setattr(BlockManager, "index_blocks", insert_then(rewrite))


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


def weak_name(self: HashChain, parent: bytes, token_ids: tuple[int, ...]) -> bytes:
    """A name of one byte."""
    return blake2b(repr((parent, token_ids)).encode(), digest_size=1).digest()


@bug("names are believed without comparing tokens", r"Broken: (oracle|index)", prefix_cache="hash")
def unverified_names(patch: Patch) -> None:
    def match(self: HashChain, token_ids: Any, limit: int, salt: str) -> Match:
        size, cursor, blocks = self.block_size, self.start(salt), []
        for end in range(size, limit + 1, size):
            name = self.name(cursor.name, tuple(token_ids[end - size : end]))
            if name not in self._entries:
                break
            cursor = Cursor(name, self._entries[name].place)
            blocks.append(self._entries[name].block)
        return Match(blocks, len(blocks) * size, cursor)

    patch.setattr(HashChain, "name", weak_name)
    patch.setattr(HashChain, "match", match)


@bug("the parent is not part of a name", r"Broken: (oracle|index)", prefix_cache="hash")
def names_without_parents(patch: Patch) -> None:
    name, start = HashChain.name, HashChain.start
    nobody = start(HashChain(1), "").name
    patch.setattr(HashChain, "name", lambda self, parent, ids: name(self, nobody, ids))
    patch.setattr(HashChain, "match", match_names_only)


def match_names_only(self: HashChain, token_ids: Any, limit: int, salt: str) -> Match:
    """A walk that compares tokens, but not parents."""
    size, cursor, blocks = self.block_size, self.start(salt), []
    for end in range(size, limit + 1, size):
        tokens = tuple(token_ids[end - size : end])
        name = self.name(cursor.name, tokens)
        entry = self._entries.get(name)
        if entry is None or entry.token_ids != tokens:
            break
        cursor = Cursor(name, entry.place)
        blocks.append(entry.block)
    return Match(blocks, len(blocks) * size, cursor)


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


@bug("a block is reused, but still found", r"Broken: (written slot|index|books|oracle)")
def never_forgotten(patch: Patch) -> None:
    allocate = BlockPool.allocate

    def keep(self: BlockPool, count: int) -> list[int]:
        index, self._index = self._index, NoPrefixCache()
        blocks = allocate(self, count)
        self._index = index
        return blocks

    patch.setattr(BlockPool, "allocate", keep)


@bug("the cache finds one block only", r"Broken: index: reused")
def short_hits(patch: Patch) -> None:
    for kind in (HashChain, RadixTree):
        match = kind.match
        patch.setattr(
            kind,
            "match",
            lambda self, ids, limit, salt, match=match: match(
                self, ids, min(limit, self.block_size), salt
            ),
        )


# ---- rows that read what another row of their step writes ----------------------------------------

CROWDED = {"capacity": 96, "block_size": 2, "max_num_seqs": 8, "spare_budget": 64, "threshold": 0}
CROWDED |= {"chunked": True, "admission": "watermark", "watermark": 0.0}
HASHED, TREE = CROWDED | {"prefix_cache": "hash"}, CROWDED | {"prefix_cache": "radix"}


@bug(
    "a short reader comes before its writer", r"Broken: unwritten: .*reads it", range(15), **HASHED
)
def readers_first(patch: Patch) -> None:
    patch.setattr(BlockManager, "is_written_by", lambda self, step, match: False)


@bug("a block is copied before it is written", r"Broken: (oracle|unwritten)", range(15), **TREE)
def copied_before_written(patch: Patch) -> None:
    patch.setattr(
        BlockManager, "match", lambda self, ids, limit, salt: self.index.match(ids, limit, salt)
    )


@bug("a block is offered when its first token is scheduled", r"Broken: (unwritten|written slot)")
def offered_half_full(patch: Patch) -> None:
    index_blocks = BlockManager.index_blocks

    def early(
        self: BlockManager, table: BlockTable, token_ids: Any, num_computed: int, step: int = 0
    ) -> None:
        if step:
            num_computed = min(len(table.blocks) * self.block_size, len(token_ids))
        index_blocks(self, table, token_ids, num_computed, step)

    patch.setattr(BlockManager, "index_blocks", early)


@bug("sampled tokens are offered when they are scheduled", r"Broken: written slot: .*is cached")
def sampled_too_early(patch: Patch) -> None:
    add_row = Scheduler._add_row

    def add(self: Scheduler, plan: Any, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed
        add_row(self, plan, sequence, num_tokens)
        known = min(start + num_tokens, len(sequence.token_ids))
        self.blocks.index_blocks(sequence.table, sequence.token_ids, known, plan.step)

    patch.setattr(Scheduler, "_add_row", add)


@bug("a row that is in the plan is preempted", r"Broken|AccountingError", range(40, 60))
def planned_and_preempted(patch: Patch) -> None:
    def victim(self: Scheduler, sequence: Sequence) -> Sequence | None:
        last = self.running[-1]
        return None if last is sequence else last

    patch.setattr(Scheduler, "_victim", victim)


@bug("readers of a failed row go on", r"Broken: unwritten: .*reads it", range(15), **HASHED)
def readers_go_on(patch: Patch) -> None:
    def only_the_writer(rows: Any, suspect: Any, in_flight: Any, blocks: BlockManager) -> None:
        for seq_id in suspect:
            blocks.forget(in_flight[seq_id].table)

    patch.setattr("minillm.scheduling.scheduler.invalidate", only_the_writer)


@bug(
    "what a failed row wrote is still found",
    r"Broken: (index|unwritten|oracle)",
    range(15),
    **HASHED,
)
def failed_but_found(patch: Patch) -> None:
    patch.setattr(BlockManager, "forget", lambda self, table: None)


@bug("the whole step of a failed row is void", r"Broken: unwritten: .*nothing", range(15), **HASHED)
def all_void(patch: Patch) -> None:
    def everyone(rows: Any, suspect: Any, in_flight: Any, blocks: BlockManager) -> None:
        failed_rows.invalidate(rows, suspect, in_flight, blocks)
        for sequence in in_flight.values():
            sequence.is_void |= sequence.seq_id not in suspect

    patch.setattr("minillm.scheduling.scheduler.invalidate", everyone)


@bug("what was written counts as coming for ever", r"Broken: books: .*coming")
def never_settled(patch: Patch) -> None:
    patch.setattr(BlockManager, "settle", lambda self, step: None)


# ---- carrying a plan out -------------------------------------------------------------------------


def in_order(*names: str) -> Callable[[Patch], None]:
    """A runner with another order."""
    rest = [name for name in ("forget", "learn") if name not in names]
    return lambda patch: patch.setattr(oracle, "ORDER", (*rest, *names))


ORDERS = {
    "copies after the writes": ("swap_out", "swap_in", "write", "copies"),
    "swap out after the writes": ("copies", "swap_in", "write", "swap_out"),
    "swap in after the writes": ("swap_out", "copies", "write", "swap_in"),
}
for name, names in ORDERS.items():
    bug(f"runner: {name}", "Broken: (oracle|unwritten)")(in_order(*names))

RARE = {"preemption_mode": "swap", "host": 3.0, "admission": "watermark", "watermark": 0.0}
bug(
    "runner: swap out after the copies",
    "Broken: (oracle|unwritten)",
    range(60, 80),
    **RARE,
    prefix_cache=None,
    block_size=8,
    capacity=64,
    max_num_seqs=8,
)(in_order("copies", "swap_out", "swap_in", "write"))
bug(
    "runner: swap in before the copies",
    "Broken: (oracle|unwritten)",
    range(125, 140),
    **RARE,
    prefix_cache="radix",
    block_size=2,
    capacity=24,
    max_num_seqs=12,
    policy="priority",
)(in_order("swap_out", "swap_in", "copies", "write"))
