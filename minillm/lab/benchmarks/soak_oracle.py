"""The requests and checks of the soak test, and the soak with an oracle, which checks every token.

Requests have shared prefixes, several completions and two cache salts; some are aborted at a random
moment, and some fail. The pool of blocks is far too small for the running requests. The oracle is a
device without a model: its next token is a hash of everything it reads through the block table.
Any block that is confused, copied too late or freed too early changes a token.
"""

import gc
import random
import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from zlib import crc32

from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockCopy, BlockManager
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.invariants import check_invariants
from minillm.scheduling.plan import NewSequence, Row, StepPlan
from minillm.scheduling.request import Request
from minillm.scheduling.request import Sequence as ScheduledSequence
from minillm.scheduling.scheduler import Scheduler

POOL_SHARE = 0.3  # pool size, as a fraction of the blocks that all running requests need
QUARTERS = 4
VOCABULARY = 11  # token ids of the oracle; few, so that some prefixes are shared by chance
STOP = 0  # a stop token that ends some requests early


class Broken(RuntimeError):
    """A check of the soak test failed."""


def require(condition: object, *facts: object) -> None:
    """Raise `Broken` unless the condition holds."""
    if not condition:
        raise Broken(" ".join(map(str, facts)))


def resident_bytes() -> int:
    """Resident memory of this process; 0 if the system does not report it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]


@dataclass(frozen=True)
class Load:
    """The configuration of one run."""

    name: str
    requests: int
    prefix_cache: str
    preemption: str
    max_num_seqs: int = 24
    budget: int = 64
    block_size: int = 4
    longest_prompt: int = 28
    longest_output: int = 24
    abort_rate: float = 0.03  # per step
    failure_rate: float = 0.01  # per request
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        """Pool size: a fraction of the blocks of `max_num_seqs` average complete sequences."""
        mean = (self.longest_prompt + self.longest_output) / 2
        return round(POOL_SHARE * self.max_num_seqs * mean / self.block_size)


@dataclass(frozen=True)
class Job:
    """One request that will be added."""

    name: str
    prompt: tuple[int, ...]
    n: int
    max_tokens: int
    salt: str
    stops: bool
    fails: bool


def draw(load: Load, number: int, rng: random.Random, vocabulary: int) -> Job:
    """Generate request `number`: one of a few prefixes, followed by random tokens."""
    head = random.Random(rng.randrange(6)).choices(range(1, vocabulary), k=rng.randrange(17))
    tail = rng.choices(range(1, vocabulary), k=rng.randint(1, load.longest_prompt - len(head)))
    return Job(
        str(number),
        (*head, *tail),
        rng.choices((1, 2, 3), (8, 1, 1))[0],
        rng.randint(1, load.longest_output),
        rng.choice(("", "", "", "other")),
        rng.random() < 0.3,
        rng.random() < load.failure_rate,
    )


@dataclass
class Result:
    """The result of a run; `objects` and `rss` hold one figure per quarter, when idle."""

    name: str
    requests: int
    num_blocks: int
    demand_blocks: int
    outcomes: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    new_tokens: int = 0
    objects: list[int] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_preemptions(self) -> int:
        """Preemptions of both kinds."""
        return self.counters["num_preemptions_recompute"] + self.counters["num_preemptions_swap"]


class Soak(ABC):
    """Adds requests, aborts some, and steps until all have ended; counts how they ended."""

    vocabulary = VOCABULARY

    def __init__(self, load: Load):
        self.load, self.rng = load, random.Random(load.seed)
        self.outcomes: Counter[str] = Counter()
        self.new_tokens = 0
        self.live: list[str] = []
        demand = round(load.num_blocks / POOL_SHARE)
        self.result = Result(load.name, load.requests, load.num_blocks, demand)

    def run(self) -> Result:
        """Run all requests, a quarter at a time."""
        start, added = perf_counter(), 0
        for quarter in range(1, QUARTERS + 1):
            end = self.load.requests * quarter // QUARTERS
            while added < end or self.live:
                while added < end and len(self.live) < 3 * self.load.max_num_seqs:
                    job = draw(self.load, added, self.rng, self.vocabulary)
                    self.add(job)
                    self.live.append(job.name)
                    added += 1
                if self.live and self.rng.random() < self.load.abort_rate:
                    self.end(self.rng.choice(self.live), "aborted")
                if self.live:
                    self.step()
            self.check_idle()
            gc.collect()
            self.result.objects.append(sys.getallocatedblocks())
            self.result.rss.append(resident_bytes())
        require(self.outcomes.total() == added == self.load.requests, "lost:", self.outcomes)
        result = self.result
        result.seconds = perf_counter() - start
        result.outcomes, result.new_tokens = dict(sorted(self.outcomes.items())), self.new_tokens
        counters, blocks = self.scheduler.counters, self.scheduler.blocks
        result.counters = {**asdict(counters), "num_copies": blocks.num_copies}
        result.counters["num_revived"] = blocks.pool.num_revived
        result.counters["num_evicted"] = blocks.pool.num_evicted
        return result

    def end(self, name: str, outcome: str) -> None:
        """Record the end of a request, which must happen exactly once."""
        self.live.remove(name)
        self.outcomes[outcome] += 1
        if outcome == "aborted":
            self.abort(name)

    def check_idle(self) -> None:
        """Check that no state of any request remains."""
        scheduler = self.scheduler
        check_invariants(scheduler)
        pools = (scheduler.blocks.pool, scheduler.blocks.host)
        require(not scheduler.sequences, "sequences are left:", scheduler.sequences)
        require(not scheduler.in_flight, "rows are in flight")
        require(all(pool.num_free == pool.num_blocks for pool in pools), "blocks are held")

    @property
    @abstractmethod
    def scheduler(self) -> Scheduler:
        """The scheduler whose state is checked."""

    @abstractmethod
    def add(self, job: Job) -> None:
        """Add a request to the waiting queue."""

    @abstractmethod
    def abort(self, name: str) -> None:
        """Abort a request."""

    @abstractmethod
    def step(self) -> None:
        """Run a step, and call `end` for every request that ended."""


# ---- the scheduler alone, over an oracle ------------------------------------------------------


def next_value(before: int, token: int) -> int:
    """The value of a position, in place of keys and values; depends on all positions before it."""
    return hash((before, token))


def next_token(values: Sequence[int], seed: int, index: int) -> int:
    """The token that the oracle returns after reading `values`."""
    return hash((seed, index, *values)) % VOCABULARY


def expected(request: Request, index: int, count: int) -> list[int]:
    """The first output tokens of a completion, computed from its prompt alone."""
    values, before, tokens = [], crc32(request.cache_salt.encode()), []
    for token in request.prompt_token_ids:
        values.append(before := next_value(before, token))
    for _ in range(count):
        tokens.append(next_token(values, request.seed, index))
        values.append(before := next_value(before, tokens[-1]))
    return tokens


class Memory:
    """Device and host memory with made-up values, and the rows of a runner."""

    def __init__(self, blocks: BlockManager):
        self.size = blocks.block_size
        self.device = [[0] * self.size for _ in range(blocks.pool.num_blocks)]
        self.host = [[0] * self.size for _ in range(blocks.host.num_blocks)]
        self.rows: dict[int, tuple[NewSequence, list[int], list[int]]] = {}
        self.salts: dict[int, int] = {}  # by sequence; plans do not contain salts

    def execute(self, plan: StepPlan) -> dict[int, list[int | None]]:
        """Execute a plan in the order that the docstring of `StepPlan` specifies."""
        for seq_id in plan.dropped:
            del self.rows[seq_id]
        for new in plan.new:
            self.rows[new.seq_id] = (new, list(new.token_ids), [])
        move(plan.swap_out, self.device, self.host)
        move(plan.copies, self.device, self.device)
        move(plan.swap_in, self.host, self.device)
        for seq_id in set(plan.dropped) - self.rows.keys():
            del self.salts[seq_id]
        for row in plan.rows:
            self._write(row)
        return {row.seq_id: self._sample(row) for row in plan.rows if row.num_samples}

    def _write(self, row: Row) -> None:
        new, tokens, table = self.rows[row.seq_id]
        table[row.num_kept :] = row.blocks
        size, before = self.size, self.salts[new.seq_id]
        for position in range(max(row.start - 1, 0), row.start + row.num_tokens):
            block = self.device[table[position // size]]
            if position >= row.start:
                block[position % size] = next_value(before, tokens[position])
            before = block[position % size]

    def _sample(self, row: Row) -> list[int | None]:
        new, tokens, table = self.rows[row.seq_id]
        end = row.start + row.num_tokens
        values = [value for block in table for value in self.device[block]][:end]
        first = new.sample_index
        indices = range(first, first + row.num_samples)
        sampled: list[int | None] = [next_token(values, new.seed, i) for i in indices]
        tokens += [token for token in sampled[:1] if token is not None]
        return sampled


def move(copies: Sequence[BlockCopy], source: list[list[int]], target: list[list[int]]) -> None:
    """Copy blocks; all sources are read before any target is written."""
    contents = [list(source[copy.source]) for copy in copies]
    for copy, values in zip(copies, contents, strict=True):
        target[copy.target] = values


@dataclass
class OracleRequest:
    """A request on the oracle: sequences and tokens by completion, and the number still running."""

    job: Job
    request: Request
    sequences: dict[int, ScheduledSequence]
    tokens: list[list[int]]
    num_running: int


class OracleSoak(Soak):
    """A soak of the scheduler and the block manager, with made-up memory."""

    def __init__(self, load: Load):
        super().__init__(load)
        host = load.num_blocks if load.preemption == "swap" else 0
        blocks = BlockManager(load.num_blocks, load.block_size, load.prefix_cache, host)
        config = SchedulerConfig(
            load.max_num_seqs, load.budget, watermark=0.0, preemption_mode=load.preemption
        )
        self._scheduler, self.memory = Scheduler(config, blocks), Memory(blocks)
        self.requests: dict[str, OracleRequest] = {}

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler whose state is checked."""
        return self._scheduler

    def add(self, job: Job) -> None:
        """Add a request to the waiting queue."""
        request = Request(
            job.name,
            job.prompt,
            SamplingParams(n=job.n),
            job.max_tokens,
            seed=len(job.prompt),
            cache_salt=job.salt,
        )
        first = self.scheduler.add(request)
        tokens: list[list[int]] = [[] for _ in range(job.n)]
        self.requests[job.name] = OracleRequest(job, request, {0: first}, tokens, job.n)

    def abort(self, name: str) -> None:
        """Abort a request, and check its tokens so far."""
        self.scheduler.abort(name)
        self._check(self.requests.pop(name))

    def step(self) -> None:
        """Schedule, execute, abort a request at random, and commit."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        require(plan.rows, "nothing can run:", scheduler.record)
        for new in plan.new:
            salt = scheduler.sequences[new.seq_id].request.cache_salt
            self.memory.salts[new.seq_id] = crc32(salt.encode())
        sampled = self.memory.execute(plan)
        owners = [(row, scheduler.in_flight[row.seq_id]) for row in plan.rows]
        for row, sequence in owners:
            job = self.requests[sequence.request.request_id].job
            if job.fails and row.num_samples and self.rng.random() < 0.2:
                sampled[row.seq_id] = [None] * row.num_samples
        if self.rng.random() < self.load.abort_rate:
            self.end(self.rng.choice(self.live), "aborted")
        for fork in scheduler.commit(plan, sampled):
            self.requests[fork.request.request_id].sequences[fork.index] = fork
        for row, sequence in owners:
            request = self.requests.get(sequence.request.request_id)
            if request is not None and row.num_samples:
                self._deliver(request, sequence.index, sampled[row.seq_id])

    def _deliver(self, live: OracleRequest, first: int, tokens: Sequence[int | None]) -> None:
        for index, token in enumerate(tokens, first):
            if token is None:
                self.abort(live.job.name)
                self.end(live.job.name, "failed")
                return
            live.tokens[index].append(token)
            if (live.job.stops and token == STOP) or len(live.tokens[index]) == live.job.max_tokens:
                self.scheduler.finish(live.sequences[index].seq_id)
                live.num_running -= 1
        if not live.num_running:
            self._check(self.requests.pop(live.job.name), whole=True)
            self.end(live.job.name, "finished")

    def _check(self, live: OracleRequest, whole: bool = False) -> None:
        """Check that the tokens are correct and, for a finished request, complete."""
        for index, tokens in enumerate(live.tokens):
            right = expected(live.request, index, live.job.max_tokens)
            if live.job.stops and STOP in right:
                right = right[: right.index(STOP) + 1]
            require(tokens == right[: len(tokens)], live.job, tokens, "instead of", right)
            require(not whole or len(tokens) == len(right), live.job, "ended early:", tokens)
            self.new_tokens += len(tokens)

    def check_idle(self) -> None:
        """Also checks that no row remains, except those that the next plan will drop."""
        super().check_idle()
        require(not self.requests, "requests are left:", self.requests)
        require(len(self.memory.rows) <= self.load.max_num_seqs, "rows are left:", self.memory.rows)
