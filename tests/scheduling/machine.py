"""A scheduler, its block manager and a token oracle, driven by rules and checked after each.

`World` has the rules and the checks. Two drivers call them with arguments from the same tables
(`SETUPS`, `SPECS`, `EVENTS`): `SchedulerMachine`, whose failures Hypothesis shrinks, and
`random_history`, a seeded `random.Random`, which is many times faster and so goes much further.

    kind of `Broken`   promise
    oracle             every token is what the prompt alone gives
    unwritten          what reads a failed row, or what was never written, is void, and nothing else
    accounting         every completion ends, once, for a known reason; nothing is left over
    books              free + cached + held = total; references = tables; a full block stays full
    written slot       what a plan writes is held by one table, and nobody can find it
    eviction           the end of a sequence is evicted before its beginning
    index              what can be found can be reached; the longest cached prefix is used
    decode             a running sequence decodes in each step, or memory is short and it is said
    progress           no plan is empty while there is work, and everything ends
    limits             tokens per step, per sequence, seats; promises of the admission
    order              nobody is admitted or preempted against the policy
    swap               nothing is recomputed that host memory had room for
    counters           they add up with the rows
    refusal            a request that can never fit is refused, and changes nothing
    runner             the plan tells a runner all it must know, and nothing twice
    drafts             they change no decision, and leave nothing behind that is not certain
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from minillm.api.sampling_params import SamplingParams
from minillm.cache.hash_chain import HashChain, Place
from minillm.cache.manager import BlockManager, BlockTable
from minillm.errors import InvalidRequestError
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.policies import POLICIES
from minillm.scheduling.record import Counters
from minillm.scheduling.request import Key, Request, Sequence
from minillm.scheduling.scheduler import Scheduler
from tests.scheduling.drafting import (
    EVERY,
    Books,
    check_room,
    decisions,
    drafts_of,
    guess,
    without_drafts,
)
from tests.scheduling.invariants import check_invariants
from tests.scheduling.oracle import (
    VOCABULARY,
    Broken,
    Expected,
    Runner,
    RunnerRow,
    Sample,
    Slot,
    num_drafts,
    require,
    root,
)

# ---- what a history is made of: simple values first, because Hypothesis shrinks to them ----------

SETUPS: Mapping[str, tuple[Any, ...]] = {
    "prefix_cache": (None, "hash", "radix", "hash", "radix"),
    "preemption_mode": ("recompute", "swap"),
    "block_size": (4, 1, 2, 8),
    "capacity": (48, 24, 16, 64, 96),  # tokens that the pool holds
    "host": (3.0, 0.3, 3.0, 0.0),  # host blocks as a multiple of the device's
    "max_num_seqs": (4, 8, 6, 2, 12, 1),
    "spare_budget": (4, 0, 12, 64),  # tokens per step above one for each sequence
    "threshold": (0, 3, 8),
    "chunked": (True, True, False),
    # Not all of POLICIES: a new one would change every history.
    "policy": ("fcfs", "priority", "shortest_prefill_first", "longest_prefix_match"),
    "admission": ("watermark", "watermark", "reserve_max", "watermark"),
    "watermark": (0.0, 0.01, 0.2),
}
SPECS: Mapping[str, tuple[Any, ...]] = {
    "family": (0, 1, 2, 3), "length": (1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 24, 33, 40),
    "max_tokens": (1, 4, 8, 12, 0, 2, 20), "n": (1, 1, 2, 3), "salt": ("", "", "", "a"),
    "priority": (0, 1, 2), "wants_logprobs": (False, False, False, False, True),
}  # fmt: skip
EVENTS = ("abort", "finish", "fail", "break")
DRAFT_EVENTS = (*EVENTS, "cut")
CROWD_EVENTS = (None, "break", "break", "abort")
IMPOSSIBLE = ("long prompt", "many tokens", "many completions", "same id")
WHICH = range(8)


@dataclass(frozen=True)
class Setup:
    """One engine."""

    prefix_cache: str | None
    preemption_mode: str
    block_size: int
    capacity: int
    host: float
    max_num_seqs: int
    spare_budget: int
    threshold: int
    chunked: bool
    policy: str
    admission: str
    watermark: float
    drafts: int | None = None  # of a row at most; these four are drawn from `drafting.DRAFTS`
    disable_by_batch: int | None = None
    draft_context: int | None = None
    uneven: bool = False

    @property
    def num_blocks(self) -> int:
        return self.capacity // self.block_size

    def config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_seqs + (self.spare_budget if self.chunked else 64),
            long_prefill_token_threshold=self.threshold if self.chunked else 0,
            enable_chunked_prefill=self.chunked,
            policy=self.policy,
            admission=self.admission,
            watermark=self.watermark,
            preemption_mode=self.preemption_mode,
        )


@dataclass(frozen=True)
class Spec:
    """One request."""

    family: int
    length: int
    max_tokens: int
    n: int
    salt: str
    priority: int
    wants_logprobs: bool


def families() -> list[tuple[int, ...]]:
    """Long prompts that agree at the start: none, 9 or 18 tokens of the first."""
    rng = Random(5)
    lines = [[rng.randrange(VOCABULARY) for _ in range(64)] for _ in range(4)]
    for line, shared in zip(lines, (0, 9, 18, 0), strict=True):
        line[:shared] = lines[0][:shared]
    return [tuple(line) for line in lines]


FAMILIES = families()
ROOTS = frozenset(map(root, SPECS["salt"]))


@lru_cache
def params_of(n: int, wants_logprobs: bool) -> SamplingParams:
    return SamplingParams(n=n, prompt_logprobs=1 if wants_logprobs else None)


def blocks_for(num_tokens: int, size: int) -> int:
    return (num_tokens + size - 1) // size


def fits(request: Request, setup: Setup) -> bool:
    """Whether the request, alone, could run to its end."""
    size, n, prompt = setup.block_size, request.params.n, len(request.prompt_token_ids)
    positions = prompt + max(request.max_tokens - 1, 0)
    most = blocks_for(positions, size)
    if setup.admission == "reserve_max":
        needed = prompt // size + n * (most - prompt // size)
    else:
        needed = blocks_for(prompt, size) + n - 1
    whole = setup.chunked or positions <= setup.config().max_num_batched_tokens
    return n <= setup.max_num_seqs and max(needed, most) <= setup.num_blocks and whole


@dataclass
class Completion:
    """What the world knows of one completion."""

    expected: Expected
    outputs: list[int] = field(default_factory=list)
    ended: str | None = None

    @property
    def request(self) -> Request:
        return self.expected.request


@dataclass
class Before:
    """How things stood before a step."""

    uncomputed: dict[int, int]
    computed: dict[int, int]
    swapped: set[int]
    findable: set[int]
    evicted: int
    host_free: int
    counters: Counters
    first_timers: set[int]
    num_sequences: int


Name = tuple[str, int]  # of a completion: its request and its index


class World:
    """A scheduler, a runner, and what ought to come out."""

    def __init__(self, setup: Setup, coverage: Counter[str]):
        self.setup, self.coverage = setup, coverage
        self.manager = BlockManager(
            setup.num_blocks,
            setup.block_size,
            setup.prefix_cache,
            int(setup.host * setup.num_blocks),
        )
        self.scheduler = Scheduler(setup.config(), self.manager)
        self.scheduler.drafts = drafts_of(setup)
        host_blocks = self.manager.host.num_blocks
        self.runner = Runner(setup.num_blocks, host_blocks, setup.block_size)
        self.runner.propose = self._guess
        self.drafts = Books(coverage)
        self.completions: dict[Name, Completion] = {}
        self.alive: dict[Name, Completion] = {}
        self.arrivals: dict[str, int] = {}
        self.forked: set[str] = set()
        self.furthest: dict[int, int] = {}
        self.num_recomputed = 0
        self.num_steps = 0  # that had work
        self.num_refused = 0
        self.num_void = 0
        self._tables: dict[int, list[int]] = {}
        self._samples: dict[int, list[Sample]] = {}  # of the last commit
        self._given: dict[int, Name] = {}  # sequences that got some of them
        self._coming: dict[int, dict[int, Slot]] = {}  # by step: what full blocks will hold
        self._broken: dict[int, set[int]] = {}  # by step: rows that write garbage
        self._failed: set[int] = set()  # sequences that had one
        coverage["histories"] += 1

    # ---- rules ---------------------------------------------------------------------------

    def add(self, spec: Spec) -> None:
        """A new request."""
        self._add(FAMILIES[spec.family][: spec.length], spec)

    def follow_up(self, which: int, spec: Spec) -> None:
        """The next turn of a chat: a prompt that begins with an earlier one and its answer."""
        name = self._pick(which, [name for name, one in self.completions.items() if one.ended])
        if name is not None:
            earlier = self.completions[name]
            tokens = earlier.request.prompt_token_ids + tuple(earlier.outputs)
            same = replace(spec, salt=earlier.request.cache_salt)
            self._add(tokens + FAMILIES[3][: spec.length % 4 + 1], same)

    def step(self) -> None:
        """Schedule, compute, commit."""
        self._step(None, 0, False)

    def step_with(self, event: str, which: int, early: bool) -> None:
        """A step during which a request is aborted, a text is complete, or a sample fails;
        `early` is before the plan is carried out."""
        self._step(event, which, early)

    def crowd(self, specs: Iterable[Spec], event: str | None, which: int) -> None:
        """Prompts that begin alike come together, and are scheduled at once."""
        specs = list(specs)
        for spec in specs:
            same = {"family": specs[0].family, "salt": specs[0].salt, "wants_logprobs": False}
            self.add(replace(spec, length=max(spec.length, 9), **same))
        self._step(event, which, False)

    def abort(self, which: int) -> None:
        """Abort a request between two steps."""
        self._abort(self._pick(which, self.alive))
        self._check_books()

    def finish(self, which: int) -> None:
        """End a running sequence between two steps."""
        running = [name_of(sequence) for sequence in self.scheduler.running]
        self._finish(self._pick(which, running))
        self._check_books()

    def impossible(self, kind: str) -> None:
        """A request that must be refused."""
        prompt, max_tokens, n, request_id = FAMILIES[0][:3], 2, 1, f"impossible {self.num_refused}"
        if kind == "long prompt":
            prompt = (1,) * (self.setup.capacity + 1)
        elif kind == "many tokens":
            max_tokens = self.setup.capacity
        elif kind == "many completions":
            n = self.setup.max_num_seqs + 1
        else:
            if not self.alive:
                return
            request_id = next(iter(self.alive))[0]
        request = Request(request_id, prompt, params_of(n, False), max_tokens)
        self._refused(request, numbers=kind != "same id")
        self.coverage[f"refused: {kind}"] += 1

    def drain(self) -> None:
        """No more arrivals: everything ends, and nothing is left."""
        longest = [len(one.request.prompt_token_ids) + 20 for one in self.alive.values()]
        patience = 100 + 20 * sum(longest) + 20 * 20 * 3 * len(longest)
        while self.scheduler.has_work:
            patience -= 1
            require(patience > 0, "progress", "this never ends")
            self.step()
        self.step()  # the runner hears of the last to go
        require(not self.alive, "accounting", "never ended", list(self.alive))
        require(not self.runner.rows, "runner", "rows are left", list(self.runner.rows))
        pool, host = self.manager.pool, self.manager.host
        require(pool.num_free == pool.num_blocks, "accounting", "device blocks are left")
        require(host.num_free == host.num_blocks, "accounting", "host blocks are left")
        for (request_id, index), completion in self.completions.items():
            outputs, right = completion.outputs, completion.expected.first(len(completion.outputs))
            require(outputs == right, "oracle", request_id, index, outputs, right)
            if completion.ended == "length":
                whole = len(outputs) == completion.request.max_tokens
                require(whole, "accounting", request_id, index, "ended early")

    # ---- how rules do it -----------------------------------------------------------------

    def _pick(self, which: int, names: Iterable[Name]) -> Name | None:
        names = list(names)
        return names[which % len(names)] if names else None

    def _add(self, prompt: tuple[int, ...], spec: Spec) -> None:
        place = len(self.arrivals)
        request = Request(
            f"r{place}-{self.num_refused}", prompt, params_of(spec.n, spec.wants_logprobs),
            spec.max_tokens, seed=place, priority=spec.priority, cache_salt=spec.salt,
        )  # fmt: skip
        if not fits(request, self.setup):
            self._refused(request, numbers=True)
            return
        sequence = self.scheduler.add(request)
        self.arrivals[request.request_id] = place
        self._know(name_of(sequence), request)
        self._check_books()

    def _refused(self, request: Request, numbers: bool) -> None:
        self.num_refused += 1
        before = self._everything()
        try:
            self.scheduler.add(request)
        except InvalidRequestError as error:
            told = not numbers or any(character.isdigit() for character in str(error))
            require(told, "refusal", "no arithmetic", error)
        else:
            raise Broken("refusal", f"{request} was accepted")
        require(self._everything() == before, "refusal", "it left traces")
        self._check_books()

    def _everything(self) -> tuple[Any, ...]:
        scheduler, pool = self.scheduler, self.manager.pool
        return (
            [sequence.seq_id for sequence in scheduler.waiting],
            [sequence.seq_id for sequence in scheduler.running], list(scheduler.sequences),
            scheduler.num_seqs, asdict(scheduler.counters), list(pool.ref_counts),
            free_order(self.manager), len(self.manager.index),
        )  # fmt: skip

    def _know(self, name: Name, request: Request) -> Completion:
        completion = Completion(Expected(request, name[1]))
        self.completions[name] = self.alive[name] = completion
        return completion

    def _end(self, name: Name, reason: str) -> None:
        self.alive.pop(name).ended = reason
        self.coverage[f"ended: {reason}"] += 1

    def _abort(self, name: Name | None) -> None:
        if name is None:
            return
        self.scheduler.abort(name[0])
        self.scheduler.abort(name[0])  # twice is fine
        for other in [other for other in self.alive if other[0] == name[0]]:
            self._end(other, "aborted")

    def _finish(self, name: Name | None) -> None:
        for sequence in list(self.scheduler.sequences.values()):
            if name is not None and name_of(sequence) == name:
                self.scheduler.finish(sequence.seq_id)
                self.scheduler.finish(sequence.seq_id)
                self._end(name, "finished")

    def _interrupt(self, event: str | None, which: int, plan: StepPlan) -> None:
        planned = [name_of(self.scheduler.in_flight[row.seq_id]) for row in plan.rows]
        if event == "abort":  # whatever is in the plan, or one that waits
            self._abort(self._pick(which, [*planned, *self.alive][: max(which, 1)]))
            self.coverage["aborted in flight"] += bool(planned)
        elif event == "finish":
            self._finish(self._pick(which, planned))
            self.coverage["finished in flight"] += bool(planned)
        if event is not None:
            self._check_books()

    def _step(self, event: str | None, which: int, early: bool) -> None:
        before, had_work = self._before(), self.scheduler.has_work
        twice = self.setup.drafts is not None and self.num_steps % EVERY == 0
        plain = without_drafts(self.scheduler) if twice else None
        plan = self.scheduler.schedule()
        if plain is not None:
            drafted = decisions(self.scheduler, plan)
            require(drafted == plain, "drafts", "they change a plan", drafted, plain)
            self.coverage["planned twice"] += 1
        self.runner.hear(plan, self.scheduler.sequences)
        self.num_steps += had_work
        self.coverage["steps"] += had_work
        self._expect(plan, event, which)
        self._check_plan(before, plan, had_work)
        self._check_books()
        self._cover(before, plan)
        if early:
            self._interrupt(event, which, plan)
        samples = self._execute(plan)
        if not early:
            self._interrupt(event, which, plan)
        self._conclude(plan, samples, event, which)

    def _conclude(
        self, plan: StepPlan, samples: dict[int, list[Sample]], event: str | None, which: int
    ) -> None:
        """Commit what a plan drew; an event may fail one of its completions, or cut a text."""
        sampled = {
            seq_id: [drawn.fingerprint % VOCABULARY for drawn in several]
            for seq_id, several in samples.items()
        }
        failed = {}
        if event == "fail" and samples:
            seq_id = list(samples)[which % len(samples)]
            failed = {seq_id: which % len(samples[seq_id])}
        self._commit(plan, samples, sampled, failed)
        if event == "cut":
            self._cut(plan, which)

    def _guess(self, row: Row, known: RunnerRow) -> list[int]:
        return guess(row, known, self.completions[known.request.request_id, known.index].expected)

    def _cut(self, plan: StepPlan, which: int) -> None:
        """A text ends within what a row was given: the tokens behind that are not its own."""
        rows = {row.seq_id: row for row in plan.rows if not row.num_forks}
        names = {
            name: seq_id
            for seq_id, name in self._given.items()
            if seq_id in rows and self.completions[name].ended in (None, "length")
        }
        name = self._pick(which, names)
        if name is None:
            return
        seq_id, completion = names[name], self.completions[name]
        count = len(self._samples[seq_id])
        num_cut = which % count
        self.scheduler.finish(seq_id, "stop", num_cut=num_cut)
        self.drafts.cut(rows[seq_id], count, num_cut)
        del completion.outputs[len(completion.outputs) - num_cut :]
        if name in self.alive:
            self._end(name, "finished")
        completion.ended = "finished"
        self.coverage["cut"] += num_cut > 0
        self._check_books()

    def _expect(self, plan: StepPlan, event: str | None, which: int) -> None:
        """What the blocks of prompts will hold once a plan is carried out, and which row fails."""
        size = self.setup.block_size
        coming = self._coming[plan.step] = {}
        moved = {target for _, target in plan.swap_in}
        for row in plan.rows:
            table = self.scheduler.in_flight[row.seq_id].table
            runs = row.start >= len(self.scheduler.in_flight[row.seq_id].request.prompt_token_ids)
            for place, block in enumerate(table.blocks):
                if place >= row.start // size or (block in moved and not runs):
                    slot = self._prompt_end(row, place)
                    coming |= {block: slot} if slot else {}
        some = [row.seq_id for row in plan.rows]
        # One from whom others read, if there is one; else any.
        some = [seq_id for seq_id in some if which and self._is_read(seq_id, plan)] or some
        self._broken[plan.step] = {some[which % len(some)]} if event == "break" and some else set()
        self.coverage["read in its step"] += sum(
            self._is_read(row.seq_id, plan) for row in plan.rows
        )

    def _is_read(self, writer: int, plan: StepPlan) -> bool:
        """Whether another row of the plan reads a block that this row completes."""
        tables = {
            row.seq_id: self.scheduler.in_flight[row.seq_id].table.blocks for row in plan.rows
        }
        completed = self._coming[plan.step].keys() & tables.pop(writer)
        return any(not completed.isdisjoint(blocks) for blocks in tables.values())

    def _prompt_end(self, row: Row, place: int) -> Slot | None:
        """The last slot of a block once this row is computed, with what is before its first, if the
        block is full of prompt tokens then."""
        size = self.setup.block_size
        sequence = self.scheduler.in_flight[row.seq_id]
        request, expected = sequence.request, self.completions[name_of(sequence)].expected
        last = (place + 1) * size - 1
        if last >= min(row.start + row.num_tokens, len(request.prompt_token_ids)):
            return None
        before = expected.value(last - size) if place else root(request.cache_salt)
        return Slot(expected.value(last), before)

    def _execute(self, plan: StepPlan) -> dict[int, list[Sample]]:
        samples = self.runner.execute(plan, self._broken[plan.step])
        if not any((plan.step, row.seq_id) in self.runner.tainted for row in plan.rows):
            del self._coming[plan.step]  # else at the commit, when what is wrong is forgotten
        self._check_written(plan)
        self._check_samples(plan, samples)
        return samples

    def _invalidate(self, plan: StepPlan) -> None:
        """A row fails: its sequence ends, and what read from it is void; nothing else is."""
        broken, scheduler = self._broken.pop(plan.step), self.scheduler
        if broken:
            scheduler.invalidate(plan, broken)
        self._coming.pop(plan.step, None)
        for row in plan.rows:
            sequence = scheduler.in_flight[row.seq_id]
            tainted = (plan.step, row.seq_id) in self.runner.tainted
            if row.seq_id in self._failed:
                continue  # of a sequence that ended for it
            if row.seq_id in broken and not sequence.is_void:
                self._failed.add(row.seq_id)
                self.coverage["broken rows"] += 1
                if name_of(sequence) in self.alive:
                    scheduler.finish(row.seq_id, "error")
                    self._end(name_of(sequence), "failed")
            else:
                void = sequence.is_void
                require(not tainted or void, "unwritten", f"{row} reads it")
                require(tainted or not void, "unwritten", f"{row} reads nothing of it")
                self.num_void += void
                self.coverage["void rows"] += void

    def _commit(
        self,
        plan: StepPlan,
        samples: Mapping[int, list[Sample]],
        sampled: dict[int, list[int]],
        failed: Mapping[int, int],
    ) -> None:
        self._invalidate(plan)
        told: dict[int, list[int | None]] = {}
        for seq_id, tokens in sampled.items():
            place = failed.get(seq_id)
            told[seq_id] = [None if i == place else token for i, token in enumerate(tokens)]
        in_flight = dict(self.scheduler.in_flight)
        self._samples, self._given = dict(samples), {}
        drafted = self._num_drafted(plan)
        for row in plan.rows:
            if num_drafts(row) and row.seq_id in failed:  # nothing follows a sample that failed
                del told[row.seq_id][failed[row.seq_id] + 1 :]
            name = name_of(in_flight[row.seq_id])
            if name in self.alive and not in_flight[row.seq_id].is_void:
                self._given |= {row.seq_id: name} if row.num_logits else {}
                if num_drafts(row):
                    self.drafts.verified(row, drafted.get(row.seq_id, 0), told[row.seq_id])
                self._account(row, name, samples.get(row.seq_id, []), told.get(row.seq_id, []))
        record = self.scheduler.in_flight.plans[0][1]
        self.scheduler.commit(plan, told, drafted)
        self.drafts.check(self.scheduler.counters, record)
        for row in plan.rows:
            own = told.get(row.seq_id, [])
            for token in own[:1] if row.num_forks else own:
                if token is not None:
                    self.runner.append(row.seq_id, token)
        self._check_commit()
        self._check_certain()
        self._check_books()
        self._poison()

    def _account(self, row: Row, name: Name, samples: list[Sample], told: list[int | None]) -> None:
        """What the commit must do to the completions of one row."""
        end, request = row.start + row.num_tokens, self.completions[name].request
        if num_drafts(row):
            end = row.start + len(told)  # each but the last is in the cache, and one before them
        known = max(self.furthest.get(row.seq_id, 0), 0)
        self.num_recomputed += max(min(end, known) - row.start, 0)
        self.furthest[row.seq_id] = max(known, end)
        if row.num_forks:
            self.forked.add(name[0])
            self.coverage["forks"] += len(samples) - 1
            for sample in samples[1:]:
                self._know((name[0], sample.completion), request)
        for sample, token in zip(samples, told, strict=not num_drafts(row)):
            each = (name[0], sample.completion)
            if token is None:
                self._end(each, "failed")
                continue
            self.alive[each].outputs.append(token)
            if len(self.alive[each].outputs) == request.max_tokens:
                self._end(each, "length")
        if not samples and request.max_tokens == 0 and end == len(request.prompt_token_ids):
            self._end(name, "computed")

    def _poison(self) -> None:
        """Nobody may read a free block again, unless the index finds it."""
        manager, runner = self.manager, self.runner
        for pool, memory, index in (
            (manager.pool, runner.device, manager.index),
            (manager.host, runner.host, ()),
        ):
            stale = [
                block
                for block in range(pool.num_blocks)
                if memory[block][0].value >= 0 and pool.is_free(block) and block not in index
            ]
            runner.poison(*((stale, ()) if memory is runner.device else ((), stale)))

    # ---- promises, after any call --------------------------------------------------------

    def _held(self) -> dict[int, BlockTable]:
        held = {**self.scheduler.in_flight, **self.scheduler.sequences}
        return {seq_id: sequence.table for seq_id, sequence in held.items()}

    def _check_books(self) -> None:
        check_invariants(self.scheduler)
        pool, index, held = self.manager.pool, self.manager.index, self._held()
        holders = Counter(block for table in held.values() for block in table.blocks)
        free = [block for block in range(pool.num_blocks) if pool.is_free(block)]
        cached = [block for block in free if block in index]
        order = free_order(self.manager)
        late = set(self.manager.unwritten.values()) - self._broken.keys()
        require(not late, "books", "still coming from", late)
        require(sorted(order) == free, "books", "the free list is not the free blocks")
        require(len(free) == pool.num_free, "books", "free blocks")
        require(len(free) + len(holders) == pool.num_blocks, "books", "free + held", holders)
        references = [holders[block] for block in range(pool.num_blocks)]
        require(pool.ref_counts == references, "books", pool.ref_counts, references)
        for one in self.scheduler.waiting:
            needed = blocks_for(one.num_computed, self.setup.block_size)
            require(len(one.table.host_blocks) == needed, "books", one.seq_id, "waits with", needed)
        alive = {name_of(sequence) for sequence in self.scheduler.sequences.values()}
        require(alive == set(self.alive), "accounting", alive, set(self.alive))
        seats = sum(self._seats(sequence) for sequence in self.scheduler.running)
        require(seats <= self.setup.max_num_seqs, "limits", seats, "sequences are running")
        self._check_eviction(order, set(cached), held)
        self._check_reachable()
        self._tables = {seq_id: list(table.blocks) for seq_id, table in held.items()}

    def _seats(self, sequence: Sequence) -> int:
        forks = sequence.request.request_id not in self.forked
        return 1 + forks * (sequence.request.params.n - 1)

    def _check_eviction(self, order: list[int], cached: set[int], held: Mapping[int, Any]) -> None:
        if not cached:
            return
        place = {block: index for index, block in enumerate(order)}
        front = order[: len(order) - len(cached)]
        require(not cached & set(front), "eviction", "uncached blocks are not used first")
        # A block that two held is freed by the last of them, in the order of its table.
        holders = Counter(block for blocks in self._tables.values() for block in blocks)
        for seq_id, blocks in self._tables.items():
            if seq_id in held and held[seq_id].blocks:
                continue
            own = (block for block in blocks if holders[block] == 1)
            freed = [place[block] for block in own if block in cached]
            require(freed == sorted(freed, reverse=True), "eviction", "beginning first", blocks)

    def _check_reachable(self) -> None:
        """A tree must not keep what no walk from its root reaches."""
        if self.setup.prefix_cache != "radix":
            return
        device, index = self.runner.device, self.manager.index
        ends = self._findable() | ROOTS
        for block in range(len(device)):
            if block in index:
                reached = self._end_of(block).before in ends
                require(reached, "index", f"block {block} is kept, but cannot be found")

    def _findable(self) -> set[int]:
        """What the findable blocks hold at their ends, which says what stands before it, too."""
        index, device = self.manager.index, self.runner.device
        if not isinstance(index, HashChain):
            return {self._end_of(block).value for block in range(len(device)) if block in index}
        # A chain may keep blocks whose predecessor it has forgotten.
        reached: set[Place] = set()
        for entry in sorted(index._entries.values(), key=lambda entry: entry.place):
            if isinstance(entry.parent, str) or entry.parent in reached:
                reached.add(entry.place)
        entries = [entry for entry in index._entries.values() if entry.place in reached]
        return {self._end_of(entry.block).value for entry in entries}

    def _end_of(self, block: int) -> Slot:
        """Its last slot, and what is before its first: now, or when the plans are carried out."""
        for coming in self._coming.values():
            if block in coming:
                return coming[block]
        slots = self.runner.device[block]
        return Slot(slots[-1].value, slots[0].before)

    # ---- promises of a plan --------------------------------------------------------------

    def _before(self) -> Before:
        scheduler, manager = self.scheduler, self.manager
        return Before(
            uncomputed={one.seq_id: one.num_uncomputed for one in scheduler.running},
            computed={one.seq_id: one.num_computed for one in scheduler.sequences.values()},
            swapped={one.seq_id for one in scheduler.waiting if one.table.host_blocks},
            findable=self._findable(),
            evicted=manager.pool.num_evicted,
            host_free=manager.host.num_free,
            counters=replace(scheduler.counters),
            first_timers={one.seq_id for one in scheduler.waiting if one.report is None},
            num_sequences=len(scheduler.sequences),
        )

    def _check_plan(self, before: Before, plan: StepPlan, had_work: bool) -> None:
        rows = {row.seq_id: row for row in plan.rows}
        require(bool(rows) == had_work, "progress", "an empty plan", self.scheduler.record)
        require(len(rows) == len(plan.rows), "limits", "a sequence is in the plan twice")
        self._check_limits(rows)
        self._check_decode(before, rows)
        self._check_order(before)
        self._check_swap(before)
        self._check_admissions(before, rows)
        running = [row.seq_id in before.uncomputed for row in plan.rows]
        lengths = [row.num_tokens > 1 for row in plan.rows]
        ordered = [long for long, runs in zip(lengths, running, strict=True) if runs or long]
        require(ordered == sorted(ordered), "order", "rows of one token come first")

    def _check_limits(self, rows: Mapping[int, Row]) -> None:
        config, record = self.scheduler.config, self.scheduler.record
        total = sum(row.num_tokens for row in rows.values())
        require(total <= config.max_num_batched_tokens, "limits", total, "tokens in a step")
        check_room(self.scheduler, rows, self.setup.draft_context)
        total -= sum(map(num_drafts, rows.values()))
        done = record.num_prefill_tokens + record.num_decode_tokens
        require(total == done, "counters", total, "tokens planned", done, "recorded")
        limit = config.long_prefill_token_threshold or total
        for seq_id, row in rows.items():
            sequence = self.scheduler.sequences[seq_id]
            num_tokens = row.num_tokens - num_drafts(row)
            left = sequence.num_tokens - row.start - num_tokens
            require(row.start == sequence.num_computed, "limits", "starts elsewhere", row)
            require(0 < num_tokens <= limit and left >= 0, "limits", "tokens of", row)
            require(config.enable_chunked_prefill or not left, "limits", "chunked", row)
            samples = self._seats(sequence) if not left and sequence.request.max_tokens else 0
            require(row.num_samples == samples + num_drafts(row), "limits", "samples of", row)
        if config.admission == "reserve_max":
            require(not record.preempted, "limits", "reserved, but preempted", record)

    def _check_decode(self, before: Before, rows: Mapping[int, Row]) -> None:
        record = self.scheduler.record
        preempted = {one.seq_id for one in record.preempted}
        stalled = {one.seq_id for one in record.stalled}
        for seq_id, left in before.uncomputed.items():
            seen = seq_id in rows or seq_id in stalled or seq_id in preempted
            require(seen, "decode", f"{seq_id} runs, but is neither planned nor reported")
            if left == 1 and seq_id in stalled:
                short = preempted or self.manager.pool.num_free == 0
                require(short, "decode", f"{seq_id} stalls beside free blocks")
                require(not record.admitted, "decode", f"{seq_id} stalls behind arrivals")
        for seq_id in stalled:
            require(seq_id not in rows, "decode", f"{seq_id} is planned and stalled")
        for seq_id in preempted:
            require(seq_id not in rows, "decode", f"{seq_id} is planned and preempted")
        lacking = bool(record.preempted or record.stalled)
        require(not (lacking and record.admitted), "decode", "arrivals take what the running lack")

    def _keys(self, sequence: Sequence) -> list[Key]:
        """Its key with any number of cached tokens that it may have."""
        policy, request = POLICIES[self.setup.policy], sequence.request
        arrival = self.arrivals[request.request_id]
        counts = range(sequence.num_tokens) if policy.reads_cache else (0,)
        return [(*policy.key(request, arrival, count), sequence.seq_id) for count in counts]

    def _check_order(self, before: Before) -> None:
        scheduler, record = self.scheduler, self.scheduler.record
        for seq_id in record.admitted:
            one = scheduler.sequences[seq_id]
            for other in scheduler.waiting:
                right = min(self._keys(one)) < max(self._keys(other))
                require(right, "order", f"{seq_id} overtakes {other.seq_id}")
                if other.arrival < one.arrival:
                    self.coverage[f"re-ordered by {self.setup.policy}"] += 1
        for preemption in record.preempted:
            victim, winner = (
                scheduler.sequences[preemption.seq_id],
                scheduler.sequences[preemption.for_seq_id],
            )
            behind = self._keys(victim)[0] > self._keys(winner)[0]
            require(behind, "order", f"{victim.seq_id} is preempted for one behind it")

    def _check_swap(self, before: Before) -> None:
        if self.setup.preemption_mode != "swap":
            return
        room = before.host_free
        for seq_id, _, mode, num_tokens in self.scheduler.record.preempted:
            needed = blocks_for(num_tokens, self.setup.block_size)
            if mode == "swap":
                require(needed <= room, "swap", "more than host memory holds")
                room -= needed
            else:
                require(needed > room, "swap", f"{seq_id} was dropped, but {room} blocks are free")
                self.coverage["host memory is full"] += self.manager.host.num_blocks > 0

    def _check_admissions(self, before: Before, rows: Mapping[int, Row]) -> None:
        scheduler = self.scheduler
        prompt_tokens = cached_tokens = 0
        for seq_id in scheduler.record.admitted:
            sequence, start = scheduler.sequences[seq_id], rows[seq_id].start
            if seq_id in before.swapped:
                require(start == before.computed[seq_id], "swap", f"{seq_id} lost its place")
                continue
            self._check_hit(sequence, start, before.findable, rows)
            self.furthest[seq_id] = max(self.furthest.get(seq_id, 0), start)
            if seq_id not in before.first_timers:
                continue
            prompt_tokens += len(sequence.request.prompt_token_ids)
            cached_tokens += start
            require(sequence.report is not None, "counters", "no report of", seq_id)
            report = asdict(sequence.report)  # type: ignore[arg-type]
            total = sum(report.values())
            right = total == len(sequence.request.prompt_token_ids) and min(report.values()) >= 0
            require(right and report["cached"] == start, "counters", "report", report)
            self.coverage.update(f"report: {name}" for name, count in report.items() if count)
        now, then = scheduler.counters, before.counters
        changes = (
            now.num_prompt_tokens - then.num_prompt_tokens,
            now.num_cached_tokens - then.num_cached_tokens,
        )
        require(changes == (prompt_tokens, cached_tokens), "counters", "prefix hits", changes)

    def _check_hit(
        self, sequence: Sequence, start: int, then: set[int], rows: Mapping[int, Row]
    ) -> None:
        """The whole blocks of the longest findable prefix, no less and no more. Blocks may be
        evicted during a step, so the truth is between what was findable before and after; and
        prompts that were scheduled before this one are findable, too."""
        coming, index = next(reversed(self._coming.values())), self.manager.index
        admitted = self.scheduler.record.admitted
        behind = set(admitted[admitted.index(sequence.seq_id) :])
        tables = [self.scheduler.sequences[seq_id].table.blocks for seq_id in rows.keys() - behind]
        blocks = {block for table in tables for block in table}
        earlier = {coming[block].value for block in blocks & coming.keys() if block in index}
        again = {self._end_of(block).value for block in blocks}  # offered again, maybe lost since
        now = self._findable() - {slot.value for slot in coming.values()}
        least, most = now & then | earlier, now | then | again
        size, expected = self.setup.block_size, self.completions[name_of(sequence)].expected
        limit = sequence.num_tokens - 1
        request = sequence.request  # the logprobs of a prompt take one computation of all of it
        if request.params.prompt_logprobs is not None:
            limit *= sequence.furthest >= len(request.prompt_token_ids)
        require(start <= limit, "index", f"{start} tokens reused, at most {limit} may be")
        low, high = (self._longest(expected, limit, findable) for findable in (least, most))
        require(low <= start // size <= high, "index", f"reused {start}, findable {low} to {high}")
        exact = self.setup.prefix_cache == "radix" or start % size == 0
        require(exact, "index", f"{start} tokens are not whole blocks")

    def _longest(self, expected: Expected, limit: int, findable: set[int]) -> int:
        size, count = self.setup.block_size, 0
        while (count + 1) * size <= limit and expected.value((count + 1) * size - 1) in findable:
            count += 1
        return count

    # ---- promises of carrying it out -----------------------------------------------------

    def _check_written(self, plan: StepPlan) -> None:
        holders = Counter(block for table in self._held().values() for block in table.blocks)
        seen: set[tuple[int, int]] = set()
        for row in plan.rows:
            for slot in self.runner.slots(row):
                block = slot[0]
                require(slot not in seen, "written slot", slot, "is written twice")
                seen.add(slot)
                place = self.runner.rows[row.seq_id].table.index(block)
                coming = any(block in coming for coming in self._coming.values())
                if coming or self._prompt_end(row, place):
                    continue  # it may be found, and read by a row behind this one
                require(holders[block] == 1, "written slot", slot, holders[block], "tables")
                require(block not in self.manager.index, "written slot", slot, "is cached")

    def _check_samples(self, plan: StepPlan, samples: Mapping[int, list[Sample]]) -> None:
        for seq_id, several in samples.items():
            if (plan.step, seq_id) in self.runner.tainted:
                continue  # it must be void, or fail
            row = self.runner.rows[seq_id]
            for index, place, drawn in several:
                name = (row.request.request_id, index)
                completion = self.completions.get(name)
                expected = completion.expected if completion else Expected(row.request, index)
                right = drawn == expected.fingerprint(place)
                require(right, "oracle", f"new token {place} of {name} read something else")

    def _check_commit(self) -> None:
        scheduler, size = self.scheduler, self.setup.block_size
        for sequence in scheduler.sequences.values():
            completion = self.completions[name_of(sequence)]
            right = [*completion.request.prompt_token_ids, *completion.outputs]
            require(sequence.token_ids == right, "oracle", "tokens of", sequence.seq_id)
            self.furthest.setdefault(sequence.seq_id, sequence.num_computed)  # of a fork
        for sequence in scheduler.running:
            needed = blocks_for(sequence.num_computed, size)
            held = len(sequence.table.blocks)
            require(held == needed, "books", f"{sequence.seq_id} needs {needed}, holds {held}")
        counted = scheduler.counters.num_recomputed_tokens
        require(counted == self.num_recomputed, "counters", counted, self.num_recomputed)
        if self.setup.preemption_mode == "swap" and not self.coverage_of_recompute + self.num_void:
            require(not self.num_recomputed, "swap", "recomputed without need")

    def _num_drafted(self, plan: StepPlan) -> dict[int, int]:
        """Of a plan that is to be committed."""
        return dict(self.runner.num_drafted)

    def _check_certain(self) -> None:
        """What was computed for drafts that were rejected is not held, found or waited for."""
        size, index = self.setup.block_size, self.manager.index
        for sequence in self.scheduler.sequences.values():
            if sequence.seq_id in self.scheduler.in_flight:
                continue  # a plan that is under way writes more
            certain, blocks = sequence.num_committed, sequence.table.blocks
            require(sequence.num_computed == certain, "drafts", "counted on", sequence.seq_id)
            held = len(blocks or sequence.table.host_blocks)
            needed = blocks_for(certain, size)
            require(held == needed, "drafts", f"{sequence.seq_id} holds {held}, needs {needed}")
            late = [each for each in blocks[certain // size :] if each in index]
            shared = sequence.table.num_adopted >= len(blocks)  # its last block, to be copied
            require(not late or shared, "drafts", f"{sequence.seq_id} offers {late}")
        if self.setup.drafts is not None and self.num_steps % EVERY == 0:
            self._check_contents()

    def _check_contents(self) -> None:
        """Whatever is found is the beginning of a sequence that there is or was."""
        right = {value for one in self.completions.values() for value in one.expected.values()}
        right |= {slot.value for coming in self._coming.values() for slot in coming.values()}
        wrong = self._findable() - right
        require(not wrong, "drafts", f"{len(wrong)} findable blocks hold what no sequence has")

    @property
    def coverage_of_recompute(self) -> int:
        """Preemptions that had to recompute."""
        return self.scheduler.counters.num_preemptions_recompute

    # ---- what was seen -------------------------------------------------------------------

    def _cover(self, before: Before, plan: StepPlan) -> None:
        scheduler, record, seen = self.scheduler, self.scheduler.record, self.coverage
        now, then = scheduler.counters, before.counters
        mode = self.setup.preemption_mode
        count = now.num_preemptions_recompute - then.num_preemptions_recompute
        seen["preempted: recompute"] += count * (mode == "recompute")
        seen["preempted: swap"] += now.num_preemptions_swap - then.num_preemptions_swap
        seen["mixed steps"] += now.num_mixed_steps - then.num_mixed_steps
        seen["copies"] += len(plan.copies)
        seen["swapped in"] += len(plan.swap_in)
        seen["stalled"] += len(record.stalled)
        seen["evicted"] += self.manager.pool.num_evicted - before.evicted
        targets = {target for _, target in plan.copies}
        seen["swapped out, then target of a copy"] += any(a in targets for a, _ in plan.swap_out)
        freed = {source for source, _ in plan.copies}
        seen["copied, then target of a swap"] += any(b in freed for _, b in plan.swap_in)
        if record.blocked is not None:
            seen[f"blocked: {record.blocked.what}"] += 1
        for one in record.preempted:
            seen[f"preempted after drafts: {one.mode}"] += one.seq_id in self.drafts.drafting
        for row in plan.rows:
            left = scheduler.sequences[row.seq_id].num_tokens - row.start - row.num_tokens
            seen["chunks"] += left > 0
            seen["drafts beside a prefill"] += num_drafts(row) > 0 < record.num_prefill_tokens
            seen["drafts cut short"] += 0 < num_drafts(row) < (self.setup.drafts or 0)
        for seq_id in record.admitted:
            start = scheduler.sequences[seq_id].num_computed
            again = seq_id not in before.first_timers
            if seq_id in before.swapped:
                continue
            seen["resumed from a prefix"] += again and start > 0
            seen["partial reuse"] += start % self.setup.block_size > 0

    def close(self) -> None:
        """Empty the engine, and add up."""
        self.drain()
        self.coverage["revived"] += self.manager.pool.num_revived


def name_of(sequence: Sequence) -> Name:
    return sequence.request.request_id, sequence.index


def free_order(manager: BlockManager) -> list[int]:
    """The free list, next one first: private, but its order is what LRU means."""
    return list(manager.pool._free)


# ---- two drivers ---------------------------------------------------------------------------------


def pick_from(rng: Random, table: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: rng.choice(values) for name, values in table.items()}


MIN_STEPS = 30  # of a history, each with work


def random_history(seed: int, coverage: Counter[str], **fixed: Any) -> World:
    """A history of at least `MIN_STEPS` steps, and its end; parts of the setup may be `fixed`."""
    rng = Random(seed)
    world = World(Setup(**{**pick_from(rng, SETUPS), **fixed}), coverage)
    events = EVENTS if world.setup.drafts is None else DRAFT_EVENTS
    rules: dict[str, tuple[int, Callable[[], None]]] = {
        "add": (30, lambda: world.add(Spec(**pick_from(rng, SPECS)))),
        "follow_up": (8, lambda: world.follow_up(rng.choice(WHICH), Spec(**pick_from(rng, SPECS)))),
        "step": (45, world.step),
        "step_with": (
            9,
            lambda: world.step_with(rng.choice(events), rng.choice(WHICH), rng.random() < 0.5),
        ),
        "crowd": (
            6,
            lambda: world.crowd(
                [Spec(**pick_from(rng, SPECS)) for _ in range(rng.randrange(2, 5))],
                rng.choice(CROWD_EVENTS),
                rng.choice(WHICH),
            ),
        ),
        "abort": (3, lambda: world.abort(rng.choice(WHICH))),
        "finish": (3, lambda: world.finish(rng.choice(WHICH))),
        "impossible": (2, lambda: world.impossible(rng.choice(IMPOSSIBLE))),
        "drain": (1, world.drain),
    }
    names, weights = list(rules), [weight for weight, _ in rules.values()]
    while world.num_steps < MIN_STEPS:
        (name,) = rng.choices(names, weights)
        coverage[f"rule {name}"] += 1
        rules[name][1]()
    world.close()
    return world


def drawn(make: Callable[..., Any], table: Mapping[str, tuple[Any, ...]]) -> st.SearchStrategy:
    return st.builds(make, **{name: st.sampled_from(values) for name, values in table.items()})


class SchedulerMachine(RuleBasedStateMachine):
    """The same rules, chosen by Hypothesis."""

    coverage: ClassVar[Counter[str]] = Counter()
    world: World | None = None

    @initialize(setup=drawn(Setup, SETUPS))
    def begin(self, setup: Setup) -> None:
        self.world = World(setup, self.coverage)

    # Every rule is as likely as any other, so those that build something up do so several times.

    @rule(specs=st.lists(drawn(Spec, SPECS), min_size=1, max_size=5))
    def add(self, specs: list[Spec]) -> None:
        for spec in specs:
            self._do("add", spec)

    @rule(which=st.sampled_from(WHICH), spec=drawn(Spec, SPECS))
    def follow_up(self, which: int, spec: Spec) -> None:
        self._do("follow_up", which, spec)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._do("step")

    @rule(event=st.sampled_from(EVENTS), which=st.sampled_from(WHICH), early=st.booleans())
    def step_with(self, event: str, which: int, early: bool) -> None:
        self._do("step_with", event, which, early)

    @rule(
        specs=st.lists(drawn(Spec, SPECS), min_size=2, max_size=4),
        event=st.sampled_from(CROWD_EVENTS),
        which=st.sampled_from(WHICH),
    )
    def crowd(self, specs: list[Spec], event: str | None, which: int) -> None:
        self._do("crowd", specs, event, which)

    @rule(how=st.sampled_from(("abort", "finish")), which=st.sampled_from(WHICH))
    def end(self, how: str, which: int) -> None:
        self._do(how, which)

    @rule(kind=st.sampled_from(IMPOSSIBLE))
    def impossible(self, kind: str) -> None:
        self._do("impossible", kind)

    def teardown(self) -> None:
        if self.world is not None:
            self._do("drain")
            self.world.close()

    def _do(self, name: str, *arguments: Any) -> None:
        self.coverage[f"rule {name}"] += 1
        world, self.world = self.world, None  # after a failure there is nothing to tear down
        getattr(world, name)(*arguments)
        self.world = world
