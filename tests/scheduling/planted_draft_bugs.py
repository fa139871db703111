"""Deliberate bugs of drafts in the scheduler, each with the promise that it breaks.

Most are bugs that other engines shipped. Some change a line of a function: `changed` plants that.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from minillm.cache.manager import BlockManager, BlockTable
from minillm.scheduling import ahead, drafts
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.plan import Row
from minillm.scheduling.record import Counters, Drafted
from minillm.scheduling.scheduler import Scheduler
from tests.scheduling.planted_bugs import Bug

Patch = pytest.MonkeyPatch

DRAFT_BUGS: list[Bug] = []
SETUP = {"drafts": 4, "disable_by_batch": None, "draft_context": None, "uneven": False}


def bug(name: str, caught_by: str, **setup: Any) -> Any:
    """Register a function that plants a bug."""

    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        DRAFT_BUGS.append(Bug(name, caught_by, apply, SETUP | setup, range(20)))
        return apply

    return register


def changed(owner: Any, name: str, old: str, new: str) -> Callable[[Patch], None]:
    """Plant `new` in place of the one `old` in the source of a function."""

    def plant(patch: Patch) -> None:
        function = inspect.unwrap(getattr(owner, name))
        source = textwrap.dedent(inspect.getsource(function))
        source = source[source.index("def ") :]
        assert source.count(old) == 1, f"{name} has {source.count(old)} times {old!r}"
        made: dict[str, Any] = {}
        exec(
            "from __future__ import annotations\n" + source.replace(old, new),
            function.__globals__,
            made,
        )
        patch.setattr(owner, name, made[function.__name__])

    return plant


# ---- what is rejected is not cut -----------------------------------------------------------------

INDEXED = "self.blocks.index_blocks(sequence.table, sequence.token_ids, sequence.num_committed)"
bug("blocks are indexed before rejected tokens are cut", r"Broken: (drafts|index|oracle)")(
    changed(
        Scheduler,
        "commit",
        INDEXED,
        "self.blocks.index_blocks(sequence.table, [*sequence.token_ids, *[0] * 9], "
        "max(row.start + row.num_tokens, sequence.num_committed))",
    )
)
bug("vLLM: blocks are indexed before accepted tokens are appended", r"Broken: (drafts|index)")(
    changed(
        Scheduler,
        "commit",
        "failed = accept(sequence, own)",
        f"{INDEXED}; failed = accept(sequence, own)",
    )
)


@bug("as many positions count as computed as were drafted", r"Broken|AccountingError")
def all_count(patch: Patch) -> None:
    patch.setattr(Row, "end_after", lambda self, accepted: self.start + self.num_tokens)


@bug("the bonus token's position counts as computed", r"Broken|AccountingError")
def bonus_counts(patch: Patch) -> None:
    end_after = Row.end_after
    patch.setattr(
        Row,
        "end_after",
        lambda self, accepted: end_after(self, accepted) + (self.num_logits > 1 == accepted),
    )


@bug("blocks of rejected drafts are kept", r"Broken: (books|drafts): .*holds")
def nothing_trimmed(patch: Patch) -> None:
    patch.setattr(BlockManager, "trim", lambda self, table, num_tokens: None)


@bug("a block too many is given back", r"Broken|AccountingError")
def trimmed_too_far(patch: Patch) -> None:
    trim = BlockManager.trim

    def too_far(self: BlockManager, table: BlockTable, num_tokens: int) -> None:
        trim(self, table, num_tokens - 1)

    patch.setattr(BlockManager, "trim", too_far)


@bug("the runner is not told of blocks that were given back", r"Broken|IndexError")
def runner_not_told(patch: Patch) -> None:
    changed(Drafts, "settle", "min(sequence.num_sent, kept)", "sequence.num_sent")(patch)


@bug(
    "a swapped sequence comes back with its drafts counted",
    r"Broken|AccountingError",
    preemption_mode="swap",
    host=3.0,
)
def swapped_with_drafts(patch: Patch) -> None:
    settle = Drafts.settle

    def counted(self: Drafts, sequence: Any, own: Any, num_drafted: Any, blocks: Any) -> Drafted:
        drafted = settle(self, sequence, own, num_drafted, blocks)
        sequence.num_computed += drafted.num_drafted - drafted.num_accepted
        return drafted

    patch.setattr(Drafts, "settle", counted)


# ---- who drafts, and how much --------------------------------------------------------------------


@bug("k is not limited by the tokens that are left", r"Broken: limits: beyond the last token")
def unlimited(patch: Patch) -> None:
    patch.setattr(Drafts, "_room", lambda self, sequence: 10**6)


@bug("the last token is drafted, too", r"Broken: limits: beyond the last token")
def last_token_drafted(patch: Patch) -> None:
    room = Drafts._room
    patch.setattr(Drafts, "_room", lambda self, sequence: room(self, sequence) + 1)


@bug("drafts beyond the context of their proposer", r"Broken: limits: beyond a c", draft_context=20)
def beyond_context(patch: Patch) -> None:
    changed(Drafts, "_room", "self.max_position is not None", "False")(patch)


bug("drafts beyond the budget", r"Broken: limits: .*tokens in a step")(
    changed(Drafts, "extend", "left -= count", "left -= 0")
)
bug("drafts beyond the free blocks", r"AccountingError|Broken")(
    changed(Drafts, "extend", "count = min(room, writable)", "count = room")
)
bug("a prefill chunk drafts (vLLM#30618)", r"Broken|Error")(
    changed(drafts, "can_draft", "decodes and generated", "row.num_tokens and row.num_logits")
)
bug("a batch above the limit drafts", r"Broken: limits: too many draft", disable_by_batch=2)(
    changed(Drafts, "extend", "num_running > self.max_num_seqs", "num_running > 10**6")
)


@bug("drafts take the budget before other rows", r"Broken: (drafts: they change|decode|progress)")
def drafts_first(patch: Patch) -> None:
    take = Scheduler._take_running

    def less(self: Scheduler, plan: Any, budget: int) -> int:
        wanted = sum(one.num_uncomputed == 1 for one in self.running)
        return take(self, plan, max(budget - wanted, 1))

    patch.setattr(Scheduler, "_take_running", less)


@bug("blocks for drafts are taken before other rows", r"Broken: (drafts: they change|decode)")
def blocks_first(patch: Patch) -> None:
    take = Scheduler._take_running

    def reserved(self: Scheduler, plan: Any, budget: int) -> int:
        held = self.blocks.pool.allocate(min(len(self.running), self.blocks.pool.num_free))
        left = take(self, plan, budget) if self.drafts is not None else 0
        self.blocks.pool.release(held)
        return left if self.drafts is not None else take(self, plan, budget)

    patch.setattr(Scheduler, "_take_running", reserved)


# ---- counting ------------------------------------------------------------------------------------


bug("the bonus token counts as accepted", r"Broken: counters: d|IndexError")(
    changed(Drafts, "settle", "max(own.count(None), 1)", "own.count(None)")
)
bug("a right draft before a failed token counts as the row's own", r"Broken: counters: d")(
    changed(Drafts, "settle", "max(own.count(None), 1)", "own.count(None) - 1")
)


@bug("planned drafts are counted, not those that were proposed", r"Broken: counters: d")
def planned_counted(patch: Patch) -> None:
    changed(
        Drafts, "settle", "(num_drafted or {}).get(seq_id, 0)", "self.num_tokens * len(own[:1])"
    )(patch)


@bug("acceptance is counted one place too far", r"Broken: counters: accepted at|IndexError")
def wrong_place(patch: Patch) -> None:
    add = Counters.add_drafts

    def shifted(self: Counters, drafted: Drafted) -> None:
        add(self, drafted)
        if drafted.num_accepted:
            self.num_accepted_at[0] -= 1
            self.num_accepted_at[-1] += 1

    patch.setattr(Counters, "add_drafts", shifted)


# ---- planning ahead: caught in `AheadWorld` ------------------------------------------------------


@dataclass(frozen=True)
class Ahead:
    """A bug that shows only where steps are planned ahead."""

    name: str
    apply: Callable[[Patch], None]


def all_predictable(patch: Patch) -> None:
    patch.setattr(Drafts, "wants", lambda self, sequence, num_running: False)
    changed(ahead, "is_predictable", "row.num_logits <= 1 and", "")(patch)


AHEAD_BUGS = [
    Ahead("a row that verifies is planned ahead as if all were accepted", all_predictable),
]
